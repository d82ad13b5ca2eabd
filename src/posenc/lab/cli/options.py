"""Options of commands, read from a command line or a file; shells complete them.

``with_settings`` gives a command those that the fields of settings declare.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_origin

from cyclopts import UNSET, App, Argument, ArgumentCollection, Group, Parameter, Token

from posenc.errors import DataError, UnknownNameError
from posenc.lab.declared import declared_options
from posenc.lab.stores import StorePath
from posenc.registration import parse_option

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext


def _read_place(_: Any, tokens: Sequence[Token]) -> PurePath:
    """A path, of this machine or of a store."""
    path: PurePath = read(Path, tokens)
    return StorePath(tokens[-1].value) if "://" in tokens[-1].value else path


PLACE = Parameter(converter=_read_place, metavar="PATH")
"""Reading of a path that may be on a store."""

Json = Annotated[bool, Parameter(help="Print JSON.")]
Quiet = Annotated[bool, Parameter(help="Print no progress.", alias="-q")]
group = functools.cache(Group.create_ordered)
"""A heading of options by its name, each below those made before."""

OPTIONS = group("Options")
FILE = "TOML file of options by name; those on the command line come first."


@Parameter(name="*")
@dataclass(frozen=True)
class FromFile:
    """Options of commands that take the others from a file too; ``configure`` acts on them."""

    config: Annotated[Path | None, Parameter(help=FILE, show_default="none")] = None
    dump_config: Annotated[
        bool, Parameter(help="Print the options given, as --config reads them.")
    ] = False


def with_settings(
    kind: type, *, to: str = "fields", **more: Parameter
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that settings declare, and those given as one argument.

    Args:
        kind: a dataclass of settings.
        to: name of the argument, a dictionary by field.
        more: field → how its value is read or completed.
    """
    defaults = {known.name: known.default for known in fields(kind)}
    annotations = {}
    for name, (hint, spec) in declared_options(kind).items():
        option, default = spec.name.replace("_", "-"), defaults[name]
        parameter = Parameter(
            name=f"--{option}",
            negative=f"--no-{option}" if default is True else (),
            help=spec.help,
            show_default=None if isinstance(default, bool) else spec.default or str(default),
            group=group(spec.group),
            converter=functools.partial(_read_field, hint, default),
        )
        annotations[name] = Annotated[hint, parameter, more.get(name, Parameter())]
    options = TypedDict(kind.__name__, annotations, total=False)  # type: ignore[misc]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__annotations__[to] = Annotated[options, Parameter(name="*")]
        return command

    return decorate


def _read_field(hint: Any, default: Any, _: Any, tokens: Sequence[Token]) -> Any:
    name = tokens[-1].keyword or "argument"
    usual = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    return parse_option(name, usual, tokens[-1].value)


def read(hint: Any, tokens: Sequence[Token]) -> Any:
    """The value of an option that no settings declare: of a list each, else the last that is given.

    Texts and paths are left as they are.
    """
    text = tokens[-1].value
    if get_origin(hint) is list:
        return [token.value for token in tokens]
    if hint is str or (hint is Path and text):
        return hint(text)
    return _read_field(hint, None, hint, tokens)


def shown(default: object) -> str | None:
    """A default in help; that of a flag goes without saying."""
    return None if default is None or isinstance(default, bool) else str(default)


def configure(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options from the file of ``--config``; print those given and exit, if so asked.

    Raises:
        DataError: if the file cannot be read.
        UnknownNameError: for an option that the command does not have.
    """
    named = {name: argument for argument in arguments for name in _names(argument)}
    if "config" not in named:
        return
    file, dump = named.pop("config").tokens, named.pop("dump_config").has_tokens
    for name, value in (_toml(file[-1].value) if file else {}).items():
        if name not in named:
            raise UnknownNameError.of("option", name, named)
        argument, items = named[name], value if isinstance(value, list) else [value]
        if not argument.tokens:
            if get_origin(argument.resolved_hint) is not list:
                items = [",".join(map(str, items)) if isinstance(value, list) else value]
            for item in items:
                truth = item if isinstance(item, bool) else UNSET
                token = Token(keyword=argument.name, value=str(item), implicit_value=truth)
                argument.tokens.append(token)
    if dump:
        for argument in arguments:
            name = next(_names(argument), "")
            if name in named and argument.tokens:
                sys.stdout.write(f"{name} = {json.dumps(_given(argument))}\n")
        raise SystemExit(0)


def _toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            "config", expected="a TOML file", got=error, remedy="Write steps = 100, for example."
        ) from error


def _given(argument: Argument) -> object:
    """The value of an option as a file has it."""
    last = argument.tokens[-1]
    if last.implicit_value is not UNSET:
        return last.implicit_value
    several = get_origin(argument.resolved_hint) is list
    return [token.value for token in argument.tokens] if several else last.value


def _names(argument: Argument) -> Iterator[str]:
    """Names in files: that of the option, and that of the argument in Python."""
    if not argument.children:
        yield argument.name.strip("-").replace("-", "_").lower()
        yield argument.field_info.name


def options_of(arguments: ArgumentCollection) -> dict[str, str]:
    """Options by name; a flag that is on by default can only have been negated."""
    return {
        name: next((no for no in argument.negatives if no.startswith("--no-")), argument.name)
        for argument in arguments
        if argument.index is None
        for name in _names(argument)
    }


def completing(names: Callable[[], Iterable[str]], joints: str = "", alone: str = "") -> Parameter:
    """Completion of names, the last of several between ``joints``; ``alone`` is joined to none."""

    def complete(context: CompletionContext) -> list[str]:
        cut = max(map(context.incomplete.rfind, joints), default=-1) + 1
        done, last = context.incomplete[:cut], context.incomplete[cut:]
        valid = [*names(), *([] if done or not alone else [alone])]
        return [done + name for name in valid if name.startswith(last)]

    return Parameter(completer=complete)


def _encodings() -> Iterable[str]:
    from posenc.registry import ENCODINGS

    return ENCODINGS


def _methods() -> Iterable[str]:
    from posenc.extension import EXTENSIONS

    return EXTENSIONS


def _tasks() -> Iterable[str]:
    from posenc.lab.experiments.tasks import TASKS

    return TASKS


ENCODING, SEVERAL_ENCODINGS = completing(_encodings, "+"), completing(_encodings, "+,")
METHODS, TASK = completing(_methods, "+,", alone="all"), completing(_tasks)
