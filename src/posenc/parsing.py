"""Arguments from text: ``name=value`` on the command line and in names of encodings."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from posenc.arguments import check
from posenc.errors import ArgumentError, UnknownNameError

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


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
    if origin in (typing.Union, types.UnionType) and type(None) in inner:
        present = next(one for one in inner if one is not type(None))
        return None if text.lower() == "none" else _read(text, present)
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
