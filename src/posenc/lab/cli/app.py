"""The ``posenc`` program: its commands and error handling."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from posenc import __version__
from posenc.errors import PosencError
from posenc.lab.cli.bench import bench
from posenc.lab.cli.compare import compare
from posenc.lab.cli.console import ERRORS, EXIT_CODES, exit_code, help_of, print_error
from posenc.lab.cli.doctor import doctor
from posenc.lab.cli.extend import evaluate, extend
from posenc.lab.cli.generate import generate
from posenc.lab.cli.options import configurable, flag, options_of
from posenc.lab.cli.show import gallery, list_encodings, list_tasks, show

app = typer.Typer(
    name="posenc",
    help="List, draw and compare positional encodings for Transformers, and extend trained models "
    "to longer contexts.",
    epilog=f"posenc COMMAND --help shows examples. {EXIT_CODES}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_encodings,
    "show": show,
    "gallery": gallery,
    "tasks": list_tasks,
    "compare": compare,
    "extend": extend,
    "evaluate": evaluate,
    "doctor": doctor,
    "generate": generate,
    "bench": bench,
}
CONFIGURABLE = ("compare", "extend", "evaluate", "bench")
"""Commands that take their options from a file too."""

for name, command in COMMANDS.items():
    app.command(name, help=help_of(command))(
        configurable(command) if name in CONFIGURABLE else command
    )


def _print_version(requested: bool) -> None:
    if requested:
        from posenc.attention.backends.native.build import description

        typer.echo(f"posenc {__version__}; CPU kernels: {description()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, flag("--debug", "Show tracebacks of errors.")] = False,
) -> None:
    """Positional encodings for Transformers."""


@functools.cache
def parser() -> Any:
    """The parser of all commands; making it takes most of a tenth of a second."""
    return typer.main.get_command(app)


def run() -> None:
    """Run the command line; a ``PosencError`` is printed without a traceback.

    Characters that the output's encoding lacks, as of a pipe on Windows, are printed as ``?``.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        parser()(prog_name="posenc")
    except PosencError as error:
        if "--debug" in sys.argv:
            ERRORS.print_exception()
        options = options_of(parser(), sys.argv[1:])
        error.argument = options.get(error.argument, error.argument)
        print_error(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        ERRORS.print("Interrupted.", style="yellow")
        sys.exit(130)
