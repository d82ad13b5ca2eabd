"""Registries of entries by name, those of other packages included, and options from text."""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Generic, Protocol, TypeVar, cast, get_args, get_origin

from posenc.arguments import check
from posenc.errors import ArgumentError, UnknownNameError

E = TypeVar("E")
Optioned = TypeVar("Optioned", bound="WithOptions")

COMMON = "common"
"""Name of a subpackage that holds helpers of entries, and no entry."""

SEVERAL = "SEVERAL"
"""Name of a package's mapping from modules that hold several entries to the names of these."""

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Truth values by their spellings."""

REGISTRIES: list[Registry[Any]] = []


class WithOptions(Protocol):
    """An entry with options."""

    def options(self) -> Mapping[str, Parameter]:
        """Parameters by name."""


@dataclass(frozen=True)
class Parsed(Generic[E]):
    """A name taken apart: ``NAME[+NAME]…[@OPTION=VALUE]…``.

    Args:
        entries: by their names, in the order in which they are joined.
        options: values by the names of options.
        words: what stands after an ``@`` and is no option.
    """

    entries: Mapping[str, E]
    options: Mapping[str, Any]
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The names alone."""
        return "+".join(self.entries)

    def options_with(self, others: Mapping[str, object]) -> dict[str, Any]:
        """The options in the name and ``others``; ArgumentError for one that is in both."""
        for option in self.options.keys() & others.keys():
            raise ArgumentError(
                option,
                expected="one value",
                got=f"{self.options[option]!r} in the name, {others[option]!r} as an argument",
                remedy="Drop one of them.",
            )
        return {**self.options, **others}


def parse_name(
    registry: Registry[Optioned],
    text: str,
    *,
    words: Collection[str] = (),
    names: Collection[str] = (),
) -> Parsed[Optioned]:
    """The entries, options and words of a name.

    Args:
        registry: of the entries.
        text: the name.
        words: valid ones besides options.
        names: what could be written in place of a name, for messages.

    Raises:
        UnknownNameError: for an unknown entry, option or word, with close matches.
        ArgumentError: for an entry that is named twice, or a value outside its option's domain.
    """
    if not isinstance(text, str):
        registry.require(text)  # which raises
    joined, *changes = text.split("@")
    parts = [part.strip() for part in joined.split("+")]
    entries = {name: registry.require(name, names) for name in parts}
    if len(entries) < len(parts):
        raise ArgumentError(
            registry.noun, expected="each name once", got=joined, remedy="Drop the repeated name."
        )
    options: dict[str, Any] = {}
    if changes:
        valid = {name: kind for entry in entries.values() for name, kind in entry.options().items()}
        items = [change for change in changes if change not in words]
        options = parse_options(items, valid, of="+".join(entries), words=words)
    return Parsed(entries, options, tuple(change for change in changes if change in words))


def assign_options(
    options: Mapping[str, object],
    entries: Mapping[str, WithOptions],
    context: Iterable[str],
    *,
    remedy: str,
) -> dict[str, dict[str, Any]]:
    """Each option, by the name of the only entry that has it.

    Args:
        options: for all entries together.
        entries: methods that are joined, by name.
        context: what can be given besides options, for messages.
        remedy: for an option that several have.

    Raises:
        UnknownNameError: for an option that none has.
        ArgumentError: for an option that several have.
    """
    chosen: dict[str, dict[str, Any]] = {name: {} for name in entries}
    for option, value in options.items():
        owners = [name for name, entry in entries.items() if option in entry.options()]
        if not owners:
            valid = [other for entry in entries.values() for other in entry.options()]
            name = f"option of {'+'.join(entries)}"
            raise UnknownNameError.of(name, option, [*context, *valid])
        if len(owners) > 1:
            raise ArgumentError(
                option,
                expected="an option of one method",
                got=f"one that {' and '.join(owners)} both have",
                remedy=remedy,
            )
        chosen[owners[0]][option] = value
    return chosen


def with_context(
    options: Mapping[str, object],
    parameters: Mapping[str, Parameter],
    context: Mapping[str, object],
    name: str,
    *,
    remedy: str,
) -> dict[str, Any]:
    """Options, and what the parameters of ``name`` take from the context.

    Raises:
        ArgumentError: if one without a default is missing; ``{}`` in ``remedy`` is its name.
    """
    arguments = dict(options)
    for parameter, description in parameters.items():
        if context.get(parameter) is not None:
            arguments[parameter] = context[parameter]
        if parameter not in arguments and description.default is description.empty:
            needed = f"a value, which {name} needs"
            raise ArgumentError(
                parameter, expected=needed, got="none", remedy=remedy.format(parameter)
            )
    return arguments


class Registry(Mapping[str, E], Generic[E]):
    """A sorted mapping from names to entries, which are imported on first access.

    Entries are the ``ENTRY`` of modules of ``packages``, named as the module (subpackages called
    ``common`` hold helpers), entry points of installed distributions, and those given to
    ``register``. A module that the package's ``SEVERAL`` lists has a function of each entry's name
    instead, which makes it.

    Args:
        kind: class of the entries.
        noun: word for an entry in messages, such as ``"encoding"``.
        packages: names of the packages that hold entries.
        group: entry-point group, such as ``"posenc.encodings"``.
        classes: entries are subclasses of ``kind`` rather than instances.
    """

    def __init__(
        self, kind: type, noun: str, *packages: str, group: str, classes: bool = False
    ) -> None:
        self.kind = kind
        self.noun = noun
        self.group = group
        self._classes = classes
        self._packages = packages
        self._read: dict[str, E] = {}
        REGISTRIES.append(self)

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Modules by the names of their entries."""
        modules: dict[str, str] = {}
        for package in map(import_module, self._packages):
            several = getattr(package, SEVERAL, {})
            for _, file, _ in iter_modules(package.__path__):
                module = f"{package.__name__}.{file}"
                if file != COMMON and module not in self._packages:
                    modules |= dict.fromkeys(several.get(file, [file]), module)
        return modules

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        """Entry points of installed distributions by name; ArgumentError for a name taken."""
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            other = points.setdefault(point.name, point)
            if point.name in self._modules or point.value != other.value:
                raise self._taken(point.name, f"the entry point {point.value}")
        return points

    def __getitem__(self, name: str) -> E:
        if name not in self._read:
            if name in self._modules:
                module = import_module(self._modules[name])
                entry = module.ENTRY if hasattr(module, "ENTRY") else getattr(module, name)()
            elif name in self._points:
                entry = self._load(self._points[name])
            else:
                raise KeyError(name)
            self._read[name] = entry
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._read or name in self._modules or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._read, *self._modules, *self._points}))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} entries: {', '.join(self)}>"

    def takes(self, entry: object) -> bool:
        """True for an object of the class of its entries."""
        if self._classes:
            return isinstance(entry, type) and issubclass(entry, self.kind)
        return isinstance(entry, self.kind)

    def load(self) -> None:
        """Import the entries of ``packages`` now."""
        for name in self._modules:
            self[name]

    def require(self, name: str, others: Collection[str] = ()) -> E:
        """The entry called ``name``; UnknownNameError with close matches if there is none.

        Args:
            name: a key.
            others: what could be written in its place, for messages.
        """
        if not isinstance(name, str):
            got = reprlib.repr(name)
            raise ArgumentError(self.noun, expected="a name", got=got, remedy="Names are strings.")
        if name in self:
            return self[name]
        names = [*self, *others]
        for other in REGISTRIES:
            if name in other:
                article = "an" if other.noun[0] in "aeiou" else "a"
                raise UnknownNameError(
                    self.noun,
                    expected="a known name",
                    got=f"{name!r}, {article} {other.noun} of {other.group}",
                    remedy=f"Valid: {', '.join(names)}.",
                )
        raise UnknownNameError.of(self.noun, name, names)

    def register(self, name: str, entry: E) -> None:
        """Add an entry; see ``posenc.register``."""
        if not (isinstance(name, str) and name.isidentifier()):
            raise ArgumentError(
                "name",
                expected="letters, digits and underscores",
                got=repr(name),
                remedy="Choose another name.",
            )
        # A class may be defined again, as notebooks do, and while its entry point is being loaded.
        registered = self._read.get(name) if self._classes else self.get(name)
        again = registered is entry or (self._classes and repr(registered) == repr(entry))
        if registered is not None and not again:
            raise self._taken(name, "another entry")
        self._read[name] = entry

    def _load(self, point: EntryPoint) -> E:
        where = f"{self.noun} {point.name}"
        remedy = f"Correct or uninstall {point.dist.name if point.dist else point.value}."
        try:
            entry = point.load()
        except Exception as error:  # another package's code can raise anything
            raise ArgumentError(
                where, expected=f"an entry at {point.value}", got=error, remedy=remedy
            ) from error
        if not self.takes(entry):
            got = type(entry).__name__
            raise ArgumentError(where, expected=self.kind.__name__, got=got, remedy=remedy)
        return cast(E, entry)

    def _taken(self, name: str, got: str) -> ArgumentError:
        return ArgumentError(
            f"{self.noun} {name}",
            expected="a name that is not taken",
            got=f"{got} of this name",
            remedy="Rename one of the two, or uninstall its package.",
        )


def register(name: str, entry: object) -> None:
    """Add an encoding, extension, task, model, backend or accelerated family.

    The entry's class decides which. It is then known wherever names are: ``create``, the laws of
    ``posenc.testing``, the commands, the pages of ``docs``. The registration holds in this process;
    an entry point of an installed distribution (groups ``posenc.encodings``,
    ``posenc.extensions``, ``posenc.tasks``, ``posenc.models``, ``posenc.backends`` and
    ``posenc.accelerated_families``) holds in all, those of the command line and its workers
    included. Worker processes import the script that calls ``compare``: call this outside of
    ``if __name__ == "__main__":``.

    Args:
        name: a new one.
        entry: of the class of that registry's entries, such as ``posenc.encoding.entry.Entry``.

    Raises:
        ArgumentError: on a name that is taken or not made of letters, digits and underscores, or
            an object that is no entry.
    """
    for registry in REGISTRIES:
        if registry.takes(entry):
            registry.register(name, entry)
            return
    kinds = ", ".join(sorted(registry.kind.__name__ for registry in REGISTRIES))
    raise ArgumentError(
        "entry", expected=f"one of {kinds}", got=type(entry).__name__, remedy="See CONTRIBUTING.md."
    )


def parse_options(
    items: Iterable[str],
    parameters: Mapping[str, Parameter],
    *,
    of: str,
    words: Collection[str] = (),
) -> dict[str, Any]:
    """Options from ``name=value`` texts, by name.

    Args:
        items: the texts.
        parameters: the valid options, as ``domains`` returns them.
        of: name of the method or task, for messages.
        words: what else could stand in an item's place, for messages.

    Raises:
        UnknownNameError: on a name that is no option.
        ArgumentError: on an item without a value, or a value out of its option's domain.
    """
    options = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in parameters:
            raise UnknownNameError.of(f"option of {of}", name, [*words, *parameters])
        if not equals:
            raise ArgumentError(
                name,
                expected="NAME=VALUE",
                got=repr(item),
                remedy=f"Write {name}=…, for example {name}={parameters[name].default}.",
            )
        options[name] = parse_option(name, parameters[name], text)
    return options


def parse_option(name: str, parameter: Parameter, text: str) -> Any:
    """``text`` parsed as a value of the parameter's type and domain.

    Truth values are ``true`` and ``false`` (or yes, no, on, off), a missing value is ``none``, and
    the items of sequences stand between commas, in brackets or not.

    Raises:
        UnknownNameError: on a name that is not among those the parameter allows.
        ArgumentError: on any other text.
    """
    value = _read(text.strip(), parameter.annotation)
    return check(name, parameter.annotation, value, parameter.default)


def _read(text: str, kind: Any) -> Any:
    """``text`` in the type ``kind``, or unchanged where it is no such value."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in inner and text.lower() == "none":
            return None
        kinds = [one for one in inner if one is not type(None)]
        return _read(text, kinds[-1] if "," in text else kinds[0])  # of a sequence or a value
    if origin is Annotated:
        return _read(text, inner[0])
    if origin in (tuple, list, Sequence):
        listed = text.strip("()[]") if text.startswith(("(", "[")) else text
        items = (item.strip() for item in listed.split(","))
        return tuple(_read(item, inner[0]) for item in items if item)
    if kind is bool:
        return TRUTHS.get(text.lower(), text)
    if kind is Path:
        return Path(text) if text else text  # "": no path
    if kind in (int, float):
        with suppress(ValueError):  # the check that follows says what is wrong
            return kind(text)
    return text
