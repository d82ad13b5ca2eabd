"""The ``posenc`` program: its commands and error handling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Literal, NoReturn, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from rich.text import Text

from posenc import __version__
from posenc.errors import ArgumentError, PosencError
from posenc.lab.cli.bench import bench
from posenc.lab.cli.compare import compare
from posenc.lab.cli.console import ERRORS, EXIT_CODES, OUT, exit_code, help_of, print_error
from posenc.lab.cli.doctor import doctor
from posenc.lab.cli.engines import engines
from posenc.lab.cli.extend import evaluate, extend
from posenc.lab.cli.generate import generate
from posenc.lab.cli.options import OPTIONS, configure, options_of, read, shown
from posenc.lab.cli.show import gallery, list_encodings, list_tasks, show

COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_encodings,
    "show": show,
    "gallery": gallery,
    "tasks": list_tasks,
    "compare": compare,
    "extend": extend,
    "evaluate": evaluate,
    "doctor": doctor,
    "engines": engines,
    "generate": generate,
    "bench": bench,
}

Shell = Literal["bash", "fish", "powershell", "zsh"]


app = App(
    name="posenc",
    help="List, draw and compare positional encodings for Transformers, and extend trained models "
    "to longer contexts.",
    help_epilogue=f"posenc COMMAND --help shows examples. {EXIT_CODES}",
    help_flags=("--help", "-h"),
    help_format="plaintext",
    version_flags=(),
    console=OUT,
    error_console=ERRORS,
    group_parameters=OPTIONS,
    default_parameter=Parameter(
        converter=read,
        show_default=shown,
        allow_repeating=True,
        negative_bool=(),
        negative_iterable=(),
    ),
    config=configure,
    print_error=False,
    exit_on_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = OPTIONS
for number, (name, command) in enumerate(COMMANDS.items()):
    words, heading, examples = help_of(command).partition("Examples:")
    texts = {"help": words, "help_epilogue": heading + examples}
    app.command(command, name=name, sort_key=number, **texts)


@app.command(name="--version", group=OPTIONS)
def _version() -> None:
    """Print the version and exit."""
    from posenc.attention.backends.native.build import description

    sys.stdout.write(f"posenc {__version__}; CPU kernels: {description()}\n")


@app.command(name="--debug", group=OPTIONS, help_flags=())
def _debug(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Show tracebacks of errors."""
    app(words)


@app.command(name="--install-completion", group=OPTIONS)
def _install_completion(shell: Shell | None = None) -> None:
    """Install completion for a shell, by default the current one."""
    sys.stdout.write(f"Written: {app.install_completion(shell=_known(shell))}\n")


@app.command(name="--show-completion", group=OPTIONS)
def _show_completion(shell: Shell | None = None) -> None:
    """Print the completion of a shell, to copy or change it."""
    sys.stdout.write(app.generate_completion(shell=_known(shell)))


def _known(shell: Shell | None) -> Shell:
    """The shell, or that which runs the program."""
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        return shell or detect_shell()
    except ShellDetectionError as error:
        expected, remedy = " or ".join(get_args(Shell)), "Name it after the option, such as bash."
        raise ArgumentError("shell", expected=expected, got=shell, remedy=remedy) from error


def arguments_of(name: str) -> ArgumentCollection:
    """Arguments and options of a command."""
    return app[name].assemble_argument_collection(default_parameter=app.default_parameter)


def run() -> None:
    """Run the command line; a ``PosencError`` is printed without a traceback.

    Characters that the output's encoding lacks, as of a pipe on Windows, are printed as ``?``.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:]
    try:
        if not words:
            app.help_print(words, console=ERRORS)
            sys.exit(2)
        app(words)
    except CycloptsError as error:
        if isinstance(error.__cause__, PosencError):
            _refuse(error.__cause__)
        ERRORS.print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(2)
    except PosencError as error:
        _refuse(error)
    except KeyboardInterrupt:
        ERRORS.print("Interrupted.", style="yellow")
        sys.exit(130)
    sys.exit(0)


def _refuse(error: PosencError) -> NoReturn:
    """Print an error, its argument as the option is called, and exit."""
    if "--debug" in sys.argv:
        ERRORS.print_exception()
    name = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    options = {} if name is None else options_of(arguments_of(name))
    error.argument = options.get(error.argument, error.argument)
    print_error(error)
    sys.exit(exit_code(error))
