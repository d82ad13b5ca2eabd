"""The ``posenc`` program: its commands and error handling."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from posenc.cli.bench import bench
from posenc.cli.compare import compare
from posenc.cli.console import ERRORS, EXIT_CODES, exit_code, help_of, print_error
from posenc.cli.evaluate import evaluate
from posenc.cli.extend import extend
from posenc.cli.gallery import gallery
from posenc.cli.generate import generate
from posenc.cli.listing import list_encodings
from posenc.cli.show import show
from posenc.cli.tasks import list_tasks
from posenc.errors import PosencError

__all__ = ["app", "run"]

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
app.command("list", help=help_of(list_encodings))(list_encodings)
app.command("show", help=help_of(show))(show)
app.command("gallery", help=help_of(gallery))(gallery)
app.command("tasks", help=help_of(list_tasks))(list_tasks)
app.command("compare", help=help_of(compare))(compare)
app.command("extend", help=help_of(extend))(extend)
app.command("evaluate", help=help_of(evaluate))(evaluate)
app.command("generate", help=help_of(generate))(generate)
app.command("bench", help=help_of(bench))(bench)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"posenc {version('posenc')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Positional encodings for Transformers."""


def _options_of(arguments: list[str]) -> dict[str, str]:
    """The options of the invoked command, by the names of their parameters."""
    command = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    names = {}
    for parameter in command.params:
        if parameter.name is not None and parameter.param_type_name == "option":
            # Of a flag that is on by default only the negation can have been given.
            negated = parameter.secondary_opts if parameter.default is True else []
            names[parameter.name] = max(negated or parameter.opts, key=len)
    return names


def run() -> None:
    """Run the command line; a ``PosencError`` is printed without a traceback."""
    try:
        app(prog_name="posenc")
    except PosencError as error:
        if "--debug" in sys.argv:
            ERRORS.print_exception()
        error.argument = _options_of(sys.argv[1:]).get(error.argument, error.argument)
        print_error(error)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        ERRORS.print("Interrupted.", style="yellow")
        sys.exit(130)
