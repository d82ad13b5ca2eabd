"""Checks that a method fits an encoding, and replacement of the changed part."""

from __future__ import annotations

import math
from typing import TypeVar

from posenc.encoding import Encoding, Part
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError

__all__ = [
    "Misfit",
    "replaced",
    "require_factor",
    "require_free_score",
    "require_length",
    "require_part",
    "require_rope",
    "require_unstretched",
]

AnyPart = TypeVar("AnyPart", bound=Part)


class Misfit(ArgumentError):
    """A method of extension that does not fit the encoding."""

    @classmethod
    def of(cls, method: str, expected: str, encoding: Encoding) -> Misfit:
        """The error for ``method``, which needs ``expected``."""
        found = " and ".join(type(part).__name__ for part in encoding.parts()) or "no encoding"
        return cls(
            "encoding",
            expected=f"{expected}, which {method} stretches",
            got=found,
            remedy="posenc.extension.applicable(encoding) lists the methods that fit.",
        )


def require_part(encoding: Encoding, kind: type[AnyPart], method: str, expected: str) -> AnyPart:
    """The encoding's part of exactly this class.

    Raises:
        Misfit: when it has none.
    """
    for part in encoding.parts():
        if type(part) is kind:
            return part
    raise Misfit.of(method, expected, encoding)


def require_rope(encoding: Encoding, method: str) -> Rope:
    """The encoding's RoPE.

    Raises:
        Misfit: when it has none.
    """
    return require_part(encoding, Rope, method, "rope")


def require_unstretched(rope: Rope, method: str) -> Rope:
    """A RoPE that nothing has stretched yet, for methods whose equations begin from its base.

    Raises:
        Misfit: when its frequencies have been divided, or its products scaled, already.
    """
    if rope.divisors is not None or rope.gain != 1:
        raise Misfit(
            "encoding",
            expected=f"the rope of training, from which {method} begins",
            got="one that is stretched already",
            remedy="Begin from the original encoding, or use rerope or self_extend.",
        )
    return rope


def require_free_score(encoding: Encoding, method: str) -> None:
    """Refuse an encoding whose site for scores, which the method needs, is taken.

    Raises:
        Misfit: when it has a score part.
    """
    if encoding.score is not None:
        raise Misfit.of(method, "rope without a score part", encoding)


def replaced(encoding: Encoding, old: Part, new: Part | None) -> Encoding:
    """The encoding with ``new`` for ``old``, on whichever site it belongs; other parts are shared.

    Raises:
        ArgumentError: when that site is taken.
    """
    kept = [part for part in encoding.parts() if part is not old]
    return Encoding.of(*kept, *(() if new is None else (new,)))


def require_factor(factor: float) -> float:
    """``factor`` if it stretches.

    Raises:
        ArgumentError: below 1, or not finite.
    """
    if not (math.isfinite(factor) and factor >= 1):
        raise ArgumentError(
            "factor",
            expected="1 or more, how many times the trained length to reach",
            got=factor,
            remedy="4 stretches 512 positions to 2048; 1 changes nothing.",
        )
    return float(factor)


def require_length(length: float, *, least: float = 2) -> float:
    """``length`` if a model can have been trained at it.

    Raises:
        ArgumentError: below ``least``.
    """
    if not (math.isfinite(length) and length >= least):
        raise ArgumentError(
            "length",
            expected=f"the length the model was trained at, {least:g} or more",
            got=length,
            remedy="In a checkpoint of transformers it is max_position_embeddings.",
        )
    return float(length)
