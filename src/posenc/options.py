"""Options written as text, ``name=value``, read by the type of the parameter that they set."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, get_args, get_origin

from posenc.arguments import check
from posenc.errors import ArgumentError, UnknownNameError

__all__ = ["parse_option", "parse_options"]

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_options(
    items: Iterable[str], parameters: Mapping[str, Parameter], *, of: str
) -> dict[str, Any]:
    """The options that ``items`` set, each ``name=value``, by name.

    Args:
        items: as a user wrote them.
        parameters: the options there are, as ``posenc.arguments.domains`` has them.
        of: whose options they are, for messages.

    Raises:
        UnknownNameError: on a name that is no option.
        ArgumentError: on an item without a value, or a value out of its option's domain.
    """
    options = {}
    for item in items:
        name, equals, text = item.partition("=")
        if name not in parameters:
            raise UnknownNameError.of(f"option of {of}", name, parameters)
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
    """The value that ``text`` stands for, in the parameter's type and domain.

    Truth values are ``true`` and ``false`` (or yes, no, on, off), a missing value is ``none``, and
    the items of sequences stand between commas, in brackets or not.

    Raises:
        UnknownNameError: on a name that is not among those the parameter allows.
        ArgumentError: on any other text.
    """
    value = _read(parameter.annotation, text.strip())
    return check(name, parameter.annotation, value, parameter.default)


def _read(annotation: Any, text: str) -> Any:
    """``text`` in the type of ``annotation``, or unchanged where it has no such form."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _read(next(kind for kind in get_args(annotation) if kind is not type(None)), text)
    if origin is Annotated:
        return _read(get_args(annotation)[0], text)
    if annotation is bool:
        return TRUTHS.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    if origin in (tuple, Sequence):
        kinds = get_args(annotation)
        items = [item for item in text.strip("()[]").split(",") if item.strip()]
        return tuple(_read(kinds[0], item.strip()) for item in items)
    return text
