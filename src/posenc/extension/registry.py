"""Registry of methods of extension."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from posenc.arguments import check
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Stretch, Trained
from posenc.registration import Registry, assign_options, parse_name, with_context

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
    """Extend an encoding by a method; unchanged parts are shared.

    Args:
        encoding: of one layer, as trained.
        name: a key of ``EXTENSIONS``, or several joined by ``+`` and applied in order
            (``"yarn+log_n"``); options may follow, each after an ``@`` (``"yarn@slow=2"``).
        factor: extension of the trained length, 1 or more.
        length: the trained length L in tokens.
        **options: of the method; with joined names, of the one method that has it.

    Raises:
        UnknownNameError: for an unknown name or option, with close matches.
        ArgumentError: if the method does not fit the encoding, or lacks an argument.

    >>> import posenc
    >>> from posenc.extension import extend
    >>> rope = posenc.create("rope", head_dim=6)
    >>> extend(rope, "ntk", factor=9).query_key.divisors
    (1.0, 3.0, 9.0)
    """
    check("encoding", Encoding, encoding)
    for method, arguments in _calls(name, {"factor": factor, "length": length}, options):
        encoding = cast(Encoding, method.function(encoding, **arguments))
    return encoding


def extend_layers(
    encodings: Sequence[Encoding],
    name: str,
    *,
    factor: float | None = None,
    length: float | None = None,
    **options: object,
) -> list[Encoding]:
    """Extend the encodings of all layers; layers that shared one still do.

    Args:
        encodings: of each layer.
        name, factor, length, options: as for ``extend``.

    Raises: as ``extend``.
    """
    encodings = check("encodings", Sequence[Encoding], encodings)
    extended = {
        id(encoding): extend(encoding, name, factor=factor, length=length, **options)
        for encoding in dict.fromkeys(encodings)
    }
    return [extended[id(encoding)] for encoding in encodings]


def applicable(encoding: Encoding) -> list[str]:
    """Sorted names of the methods that fit an encoding; those of models fit any."""
    check("encoding", Encoding, encoding)
    return [name for name, method in EXTENSIONS.items() if _fits(method, encoding)]


def advice(
    encoding: Encoding,
    name: str,
    *,
    factor: float | None = None,
    length: float | None = None,
    **options: object,
) -> tuple[str, ...]:
    """Notes on extending an encoding with these arguments, such as defaults that do not suit it.

    Args and Raises: as ``extend``.

    >>> import posenc
    >>> from posenc.extension import advice
    >>> rope = posenc.create("rope", head_dim=16)
    >>> advice(rope, "llama3", length=64, factor=4)[0][:45]
    'Of 8 pairs 1 turn 4 times or more within 64 t'
    """
    check("encoding", Encoding, encoding)
    context = {
        "factor": check("factor", Stretch | None, factor, None),
        "length": check("length", Trained | None, length, None),
    }
    notes: tuple[str, ...] = ()
    for method, arguments in _calls(name, context, options):
        if method.advice is not None:
            available, taken = context | arguments, inspect.signature(method.advice).parameters
            notes += method.advice(encoding, **{n: v for n, v in available.items() if n in taken})
    return notes


def _fits(method: Extension, encoding: Encoding) -> bool:
    if method.level == "model":
        return True
    sample: dict[str, Any] = {"factor": 1.0, "length": 64.0}
    try:
        method.function(encoding, **{n: v for n, v in sample.items() if n in method.parameters()})
    except NotApplicable:
        return False
    return True


def _calls(
    names: str, context: Mapping[str, float | None], options: Mapping[str, object]
) -> Iterator[tuple[Extension, dict[str, Any]]]:
    """Joined methods, each with its arguments from the context and its options."""
    parsed = parse_name(EXTENSIONS, names)
    for name, method in parsed.entries.items():
        if method.level == "model":
            raise ArgumentError(
                "method",
                expected="one that changes encodings",
                got=f"{name!r}, which changes how a model is run",
                remedy=f"Use posenc.extension.{name}(model, …).",
            )
    remedy = "Apply one after the other: extend(extend(…), …)."
    merged = parsed.options_with(options)
    chosen = assign_options(merged, parsed.entries, context, remedy=remedy)
    for name, method in parsed.entries.items():
        remedy = "factor says how far to stretch, length at what length it was trained."
        yield method, with_context(chosen[name], method.parameters(), context, name, remedy=remedy)
