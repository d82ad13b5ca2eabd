"""Every method of extension by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from posenc.encoding import Encoding
from posenc.errors import ArgumentError, UnknownNameError
from posenc.extension.entry import CONTEXT, Extension
from posenc.extension.fitting import Misfit
from posenc.registration import Registry

__all__ = ["EXTENSIONS", "advice", "applicable", "extend", "extend_layers"]

EXTENSIONS: Registry[Extension] = Registry(
    Extension, "method", "posenc.extension.methods", group="posenc.extensions"
)
"""Every method by name, sorted; those of other packages included."""


def extend(
    encoding: Encoding,
    name: str,
    *,
    factor: float | None = None,
    length: float | None = None,
    **options: object,
) -> Encoding:
    """The encoding stretched by the method called ``name``; what it does not change is shared.

    Args:
        encoding: of one layer, as trained.
        name: a key of ``EXTENSIONS``, or several joined by ``+``, applied in that order
            (``"yarn+log_n"``).
        factor: how many times the trained length to reach, 1 or more.
        length: the trained length L in tokens.
        **options: the method's own options. With joined names an option goes to the one method
            that has it.

    Raises:
        UnknownNameError: on a name or option that does not exist, with the close matches.
        ArgumentError: when the method does not fit the encoding or needs what is not given.

    >>> import posenc
    >>> from posenc.extension import extend
    >>> rope = posenc.create("rope", head_dim=6)
    >>> extend(rope, "ntk", factor=9).query_key.divisors
    (1.0, 3.0, 9.0)
    """
    names = [part.strip() for part in name.split("+")]
    chosen = _assign(options, names)
    for each in names:
        arguments = _arguments(each, {"factor": factor, "length": length}, chosen[each])
        encoding = cast(Encoding, EXTENSIONS[each].function(encoding, **arguments))
    return encoding


def extend_layers(
    encodings: Sequence[Encoding],
    name: str,
    *,
    factor: float | None = None,
    length: float | None = None,
    layers: Mapping[int, Mapping[str, Any]] | None = None,
    **options: object,
) -> list[Encoding]:
    """The encodings of all layers stretched; layers that shared one still do.

    Args:
        encodings: one a layer.
        name, factor, length, options: as for ``extend``.
        layers: by the number of a layer (from 0) what is different there: other values of
            ``factor``, ``length`` or options. Such a layer shares with none.

    Raises: as ``extend``; also ArgumentError for a layer that does not exist.
    """
    layers = {} if layers is None else layers
    for number in layers:
        if not 0 <= number < len(encodings):
            raise ArgumentError(
                "layers",
                expected=f"numbers from 0 to {len(encodings) - 1}",
                got=number,
                remedy="Layers are counted from 0.",
            )
    common: dict[str, Any] = {"factor": factor, "length": length} | options
    shared: dict[int, Encoding] = {}
    stretched = []
    for number, encoding in enumerate(encodings):
        if number in layers:
            stretched.append(extend(encoding, name, **(common | dict(layers[number]))))
            continue
        if id(encoding) not in shared:
            shared[id(encoding)] = extend(encoding, name, **common)
        stretched.append(shared[id(encoding)])
    return stretched


def applicable(encoding: Encoding) -> list[str]:
    """The names of the methods that fit an encoding, sorted; those for models fit any."""
    return [name for name, method in EXTENSIONS.items() if _fits(method, encoding)]


def advice(
    encoding: Encoding,
    name: str,
    *,
    factor: float | None = None,
    length: float | None = None,
    **options: object,
) -> tuple[str, ...]:
    """Advice on stretching the encoding like this: sentences, maybe none.

    YaRN's ramp, for one, is meant for thousands of tokens: at a short trained length its defaults
    do something else than their names say, and this tells what, and which values to use.

    Args and Raises: as ``extend``.

    >>> import posenc
    >>> from posenc.extension import advice
    >>> rope = posenc.create("rope", head_dim=16)
    >>> advice(rope, "llama3", length=64, factor=4)[0]
    'Of 8 pairs 1 turn 4 times or more within 64 tokens and are meant to stay, 5 turn at most 1 \
times and are meant to be interpolated, 2 to be blended.'
    """
    names = [part.strip() for part in name.split("+")]
    chosen = _assign(options, names)
    told: tuple[str, ...] = ()
    for each in names:
        method = EXTENSIONS[each]
        if method.advice is None:
            continue
        arguments = _arguments(each, {"factor": factor, "length": length}, chosen[each])
        given = {"factor": factor, "length": length} | arguments
        told += method.advice(encoding, **_taken(method.advice, given))
    return told


def _fits(method: Extension, encoding: Encoding) -> bool:
    if method.level == "model":
        return True
    known: dict[str, Any] = {"factor": 1.0, "length": 64.0}
    try:
        method.function(encoding, **{n: v for n, v in known.items() if n in method.parameters()})
    except Misfit:
        return False
    return True


def _assign(options: Mapping[str, object], names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Give each option to the one method that has it."""
    for name in names:
        if EXTENSIONS.require(name).level == "model":
            raise ArgumentError(
                "method",
                expected="one that changes encodings",
                got=f"{name!r}, which changes how a model is run",
                remedy=f"Use posenc.extension.{name}(model, …).",
            )
    chosen: dict[str, dict[str, object]] = {name: {} for name in names}
    for option, value in options.items():
        owners = [name for name in chosen if option in EXTENSIONS[name].options()]
        if not owners:
            valid = [each for name in chosen for each in EXTENSIONS[name].options()]
            raise UnknownNameError.of(f"option of {'+'.join(chosen)}", option, valid)
        if len(owners) > 1:
            raise ArgumentError(
                option,
                expected="an option of one method",
                got=f"one that {' and '.join(owners)} both have",
                remedy="Apply one after the other: extend(extend(…), …).",
            )
        chosen[owners[0]][option] = value
    return chosen


def _arguments(
    name: str, context: Mapping[str, float | None], options: Mapping[str, object]
) -> dict[str, Any]:
    """The arguments that the method takes from the context, and its options."""
    arguments = dict(options)
    for parameter, description in EXTENSIONS[name].parameters().items():
        if parameter in CONTEXT and context[parameter] is not None:
            arguments[parameter] = context[parameter]
        if parameter not in arguments and description.default is description.empty:
            raise ArgumentError(
                parameter,
                expected=f"a value, which {name} needs",
                got="none",
                remedy="factor says how far to stretch, length at what length it was trained.",
            )
    return arguments


def _taken(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes."""
    return {n: v for n, v in arguments.items() if n in inspect.signature(function).parameters}
