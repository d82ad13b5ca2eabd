"""Stretching of rotary frequencies in place, where a method does no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.transformers.stretching.changes import Undoable, undone_on_error
from posenc.transformers.stretching.frequencies import Frequencies, SineTable
from posenc.transformers.stretching.probing import layer_type_of, watch
from posenc.transformers.stretching.report import StretchedPart

Calls = dict[tuple[nn.Module, str], tuple[Any, Any]]
"""Arguments of the first call of each rotary module for each type of layers."""


def divides_frequencies(encoding: Encoding) -> bool:
    """True if an encoding is RoPE with other frequencies and another gain, and nothing else."""
    return type(encoding.query_key) is Rope and len(encoding.parts()) == 1


def windowed(layer_type: str) -> bool:
    """True for a type of layers that see a window."""
    return layer_type.startswith(("sliding", "chunked"))


def called(model: Any, frequencies: list[Frequencies]) -> tuple[list[Frequencies], Calls]:
    """Frequencies that a text is rotated by, and the calls of their modules."""
    calls: Calls = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.setdefault((module, layer_type_of(arguments, options)), (arguments, options))

    watch(model, dict.fromkeys(f.module for f in frequencies), note)
    used = [f for f in frequencies if any(f.rotates(*call) for call in calls)]
    return used, calls


def set_ropes(
    stretched: Mapping[Frequencies, Encoding], calls: Calls, factor: float | None
) -> list[Undoable]:
    """Replace frequencies.

    Raises:
        ArgumentError: if a module does not read its gain.
    """
    with undone_on_error() as changes:
        for frequencies, encoding in stretched.items():
            rope = encoding.query_key
            assert isinstance(rope, Rope)
            if isinstance(frequencies, SineTable):
                rows = round(len(frequencies.value) * (factor or 1))
                changes += frequencies.set_rope(rope, rows)
                continue
            changes += frequencies.set_rope(rope)
            _require_gain(frequencies, rope, calls)
    return changes


def _require_gain(frequencies: Frequencies, rope: Rope, calls: Calls) -> None:
    for (module, kind), (arguments, options) in calls.items():
        if not frequencies.rotates(module, kind):
            continue
        with torch.no_grad():
            gain = _gain(module(*arguments, **options))
        if abs(gain - rope.gain) > 0.01 * rope.gain:
            raise ArgumentError(
                "method",
                expected=f"one without a gain, which {frequencies.path} does not read",
                got=f"gain {rope.gain:.4g}",
                remedy="temperature=1 leaves it out of yarn; ntk and interpolate have none.",
            )


def _gain(output: Any) -> float:
    """The length of the first token's first pair."""
    if isinstance(output, tuple):
        cosine, sine = (float(x.flatten()[0]) for x in output)
        return math.hypot(cosine, sine)
    return float(output.flatten()[0].abs())


def rows(
    frequencies: list[Frequencies],
    stretched: Mapping[Frequencies, Encoding],
    used: list[Frequencies],
) -> tuple[StretchedPart, ...]:
    """Report of frequencies."""
    parts = []
    for f in frequencies:
        kind = type(f.module).__name__
        if f in stretched:
            parts.append(StretchedPart(f.name, kind, True, describe(stretched[f])))
            continue
        reason = "its layers see a window" if f in used else "no text is rotated by it"
        parts.append(StretchedPart(f.name, kind, False, reason))
    return tuple(parts)


def describe(encoding: Encoding) -> str:
    """An encoding in a few words."""
    part = encoding.score or encoding.query_key
    if part is None:
        return "no positions"
    if not isinstance(part, Rope):
        return f"{type(part).__name__}({part.extra_repr()})"
    divisors = part.divisors or (1.0,)
    gain = "" if part.gain == 1 else f", gain {part.gain:.4g}"
    return f"frequencies divided by {min(divisors):.4g} to {max(divisors):.4g}{gain}"
