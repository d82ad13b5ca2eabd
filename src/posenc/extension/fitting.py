"""Validation of methods of extension, and replacement of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import torch
from torch import Tensor, nn

from posenc.arguments import EXACT, Interval, check
from posenc.encoding import Encoding, Part
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError

AnyPart = TypeVar("AnyPart", bound=Part)

Stretch = Annotated[
    float, Interval(1, below=True, remedy="4 stretches 512 positions to 2048; 1 changes nothing.")
]
"""How many times the trained length to reach."""

TRAINED = "In a checkpoint of transformers it is max_position_embeddings."

Trained = Annotated[float, Interval(2, EXACT, remedy=TRAINED)]
"""The trained length in tokens."""


class NotApplicable(ArgumentError):
    """The method does not fit the encoding."""

    @classmethod
    def of(cls, method: str, expected: str, encoding: Encoding) -> NotApplicable:
        """The error of a method that needs ``expected``."""
        parts = " and ".join(type(part).__name__ for part in encoding.parts()) or "no encoding"
        return cls(
            "encoding",
            expected=f"{expected}, which {method} stretches",
            got=parts,
            remedy="posenc.extension.applicable(encoding) lists the methods that fit.",
        )


def require_part(encoding: Encoding, kind: type[AnyPart], method: str, expected: str) -> AnyPart:
    """The encoding's part of exactly this class.

    Raises:
        NotApplicable: if there is none.
    """
    for part in check("encoding", Encoding, encoding).parts():
        if type(part) is kind:
            return part
    raise NotApplicable.of(method, expected, encoding)


def require_rope(
    encoding: Encoding, method: str, *, as_trained: bool = False, free_score: bool = False
) -> Rope:
    """The encoding's RoPE.

    Args:
        encoding: to extend.
        method: for messages.
        as_trained: refuse one that has been extended already.
        free_score: refuse encodings with a score part.

    Raises:
        NotApplicable: if there is no such RoPE.
    """
    rope = require_part(encoding, Rope, method, "rope")
    if as_trained and (rope.divisors is not None or rope.gain != 1):
        raise NotApplicable(
            "encoding",
            expected=f"the rope of training, from which {method} begins",
            got="one that is stretched already",
            remedy="Begin from the original encoding, or use rerope or self_extend.",
        )
    if free_score and encoding.score is not None:
        raise NotApplicable.of(method, "rope without a score part", encoding)
    return rope


def replaced(encoding: Encoding, old: Part, new: Part | None) -> Encoding:
    """The encoding with ``new`` (None: nothing) in place of ``old``; other parts are shared.

    Raises:
        ArgumentError: if the site of ``new`` is taken.
    """
    others = [part for part in encoding.parts() if part is not old]
    return Encoding.of(*others, *(() if new is None else (new,)))


def remade(part: AnyPart, *, tables: Mapping[str, Tensor], **changed: object) -> AnyPart:
    """A new part with other tables, and with the options of ``part`` but for those changed.

    A table is trained if the one that it replaces was.
    """
    with torch.device("meta"):
        made = type(part)(**{**part.given, **changed})
    for name, table in tables.items():
        before: Tensor = getattr(part, name)
        setattr(made, name, nn.Parameter(table, requires_grad=before.requires_grad))
    return made.train(part.training)
