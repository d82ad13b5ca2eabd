"""Options of commands: declared by fields of settings, read from a command line or a file.

``with_settings`` gives a command an option for each field, and the values read to its body, which
makes the settings of a run from them. Shells complete them.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from posenc.errors import DataError, UnknownNameError
from posenc.lab.declared import declared_options
from posenc.registration import parse_option

KEYWORD = Parameter.KEYWORD_ONLY


def option(help_text: str, default: str | bool = True, *names: str, **more: Any) -> Any:
    """An option with its help, the displayed default, its names and more of ``typer.Option``."""
    return typer.Option(*names, help=help_text, show_default=default, **more)


def flag(name: str, help_text: str, *short: str) -> Any:
    """An option without a value."""
    return typer.Option(name, *short, help=help_text)


Json = Annotated[bool, flag("--json", "Print JSON.")]
Quiet = Annotated[bool, flag("--quiet", "Print no progress.", "-q")]


def with_settings(
    kind: type,
    *,
    to: str = "fields",
    parse: Mapping[str, Callable[[str], Any]] | None = None,
    complete: Mapping[str, Callable[[str], list[str]]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that settings declare, and those given as one argument.

    Args:
        kind: a dataclass of settings.
        to: name of the argument, by field.
        parse: field → from text to its value; by default its type says how.
        complete: field → completion of its value.
    """
    declared = declared_options(kind)
    defaults = {known.name: known.default for known in fields(kind)}

    def read(name: str, text: str) -> Any:
        if parse and name in parse:
            return parse[name](text)
        usual = Parameter(name, KEYWORD, default=defaults[name], annotation=declared[name][0])
        return parse_option(declared[name][1].name, usual, text)

    def parameter(name: str) -> Parameter:
        (hint, spec), default = declared[name], defaults[name]
        shown: dict[str, Any] = {"help": spec.help, "rich_help_panel": spec.group}
        if isinstance(default, bool):
            flag = f"--{spec.name}/--no-{spec.name}" if default else f"--{spec.name}"
            annotation: Any = Annotated[bool, typer.Option(flag, **shown)]
            return Parameter(spec.name, KEYWORD, default=default, annotation=annotation)
        shown |= {"show_default": spec.default or str(default), "metavar": _metavar(hint)}
        annotation = Annotated[
            str | None, typer.Option(**shown, autocompletion=(complete or {}).get(name))
        ]
        return Parameter(spec.name, KEYWORD, default=None, annotation=annotation)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**options: Any) -> None:
            values = {name: options.pop(spec.name) for name, (_, spec) in declared.items()}
            known = {
                name: read(name, value) if isinstance(value, str) else value
                for name, value in values.items()
                if value is not None and value is not defaults[name]
            }
            command(**{to: known}, **options)

        parameters = dict(signature(command, eval_str=True).parameters)
        del parameters[to]
        return _resigned(call, [*map(parameter, declared), *parameters.values()])

    return decorate


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """The command with ``--config``, a file of its options, and ``--dump-config``."""

    parameters = signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def call(*, config: Path | None, dump_config: bool, **options: Any) -> None:
        if dump_config:
            changed = {n: value for n, value in options.items() if value != parameters[n].default}
            typer.echo(_toml(changed), nl=False)
        else:
            command(**options)

    file = typer.Option(
        help="TOML file of options by name; those on the command line come first.",
        show_default="none",
        is_eager=True,
        callback=_configure,
    )
    dump = typer.Option("--dump-config", help="Print the options given, as --config reads them.")
    return _resigned(
        call,
        [
            *parameters.values(),
            Parameter("config", KEYWORD, default=None, annotation=Annotated[Path | None, file]),
            Parameter("dump_config", KEYWORD, default=False, annotation=Annotated[bool, dump]),
        ],
    )


def _resigned(call: Callable[..., None], parameters: list[Parameter]) -> Callable[..., None]:
    """A function by the parameters of its command line, all by keyword."""
    keywords = [parameter.replace(kind=KEYWORD) for parameter in parameters]
    call.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return call


def _metavar(hint: Any) -> str:
    """The type of a setting, for help."""
    while get_origin(hint) in (Annotated, Union, UnionType):
        hint = get_args(hint)[0]
    return {int: "<int>", float: "<float>", Path: "<path>"}.get(hint, "<str>")


def _configure(context: typer.Context, path: Path | None) -> Path | None:
    """Take the defaults of a command from a file.

    Raises:
        DataError: if it cannot be read.
        UnknownNameError: for an option that the command does not have.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            "config", expected="a TOML file", got=error, remedy="Write steps = 100, for example."
        ) from error
    parameters = {parameter.name: parameter for parameter in context.command.params}
    for name in values:
        if name not in parameters:
            raise UnknownNameError.of("option", name, [key for key in parameters if key])
    context.default_map = {
        name: ",".join(map(str, value))
        if isinstance(value, list) and not parameters[name].multiple
        else value
        for name, value in values.items()
    }
    return path


def _toml(values: Mapping[str, Any]) -> str:
    """A line a value."""
    plain = {n: str(value) if isinstance(value, Path) else value for n, value in values.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in plain.items())


def options_of(command: Any, arguments: list[str]) -> dict[str, str]:
    """The options of the invoked command, by the names of their parameters."""
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    options = {}
    for parameter in command.params:
        if parameter.name is not None and parameter.param_type_name == "option":
            # Of a flag that is on by default only the negation can have been given.
            negated = parameter.secondary_opts if parameter.default is True else []
            options[parameter.name] = max(negated or parameter.opts, key=len)
    return options


def complete_encoding(incomplete: str) -> list[str]:
    """Encodings that start with ``incomplete``."""
    from posenc.registry import ENCODINGS

    return _last(incomplete, ENCODINGS, between="+")


def complete_encodings(incomplete: str) -> list[str]:
    """Completions of the last of several comma-separated encodings."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in complete_encoding(last)]


def complete_methods(incomplete: str) -> list[str]:
    """Completions of the last of several comma-separated methods of ``posenc extend``."""
    from posenc.extension import EXTENSIONS

    done, comma, last = incomplete.rpartition(",")
    names = [*EXTENSIONS, *(() if comma else ("all",))]
    return [f"{done}{comma}{name}" for name in _last(last, names, between="+")]


def complete_task(incomplete: str) -> list[str]:
    """Tasks of ``posenc compare`` that start with ``incomplete``."""
    from posenc.lab.experiments.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


def _last(incomplete: str, names: Iterable[str], *, between: str) -> list[str]:
    """Completions of the last of several names separated by ``between``."""
    done, joint, last = incomplete.rpartition(between)
    return [f"{done}{joint}{name}" for name in names if name.startswith(last)]
