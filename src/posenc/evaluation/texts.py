"""A text as ids: of its bytes, or of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.evaluation.suites.needles import ByteNeedles, KeyNeedles, Needles, letters
from posenc.experiments.corpus import read_corpus

__all__ = ["Encode", "Marks", "Text", "read_ids"]

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without special ones."""

MOST_BYTES = 4_000_000
"""Of a part that are encoded by a tokenizer: more would take longer than it is worth."""

POOL = 256
"""Ids that words to be copied are made of: so many that the text has, and not the rarest."""


@dataclass(frozen=True)
class Marks:
    """Ids that a tokenizer adds.

    Args:
        begin, end: which stand around a text.
        mask: which stands for a token that is hidden; None: there is none.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    mask: int | None = None

    @property
    def count(self) -> int:
        """How many stand around a text."""
        return len(self.begin) + len(self.end)

    def around(self, rows: Tensor) -> Tensor:
        """``[N, L]`` ids with these around them; of truth values: with False around them."""
        begin, end = (
            torch.tensor(ids, dtype=torch.int64).expand(len(rows), -1)
            * (rows.dtype is not torch.bool)
            for ids in (self.begin, self.end)
        )
        return torch.cat([begin.to(rows.dtype), rows, end.to(rows.dtype)], dim=1)


@dataclass(frozen=True, eq=False)
class Text:
    """A text to measure on, and one to train on.

    Args:
        measured, trained: ``[T]`` ids that share nothing. Where nothing is to be trained, the
            latter are none.
        unit: what an id stands for, ``"byte"`` or ``"token"``.
        needles: how they are hidden in it.
        pool: ids that words to be copied are made of.
        name: of the text, in a phrase.
        sha256: of its bytes.
        marks: which the tokenizer adds.
    """

    measured: Int[Tensor, " T"]
    trained: Int[Tensor, " T"]
    unit: str
    needles: Needles
    pool: Int[Tensor, " P"]
    name: str
    sha256: str
    marks: Marks = field(default_factory=Marks)


def read_ids(
    path: Path | None, *, encode: Encode | None, training: bool, marks: Marks | None = None
) -> Text:
    """The text at ``path``, or the shipped one, as ids.

    Args:
        path: a file or folder.
        encode: of the tokenizer; None: ids are bytes.
        training: whether anything is to be trained: then what is measured is held out. Of
            the shipped text it always is, since models of the lab were trained on the rest.
        marks: which the tokenizer adds; none by default.

    Raises:
        DataError: when it is unusable.
    """
    corpus = read_corpus(path)
    held_out = corpus.held_out
    if path is not None and not training:
        held_out = corpus.train + corpus.held_out
    to_train = corpus.train if training else b""
    measured, trained = (_ids(part, encode) for part in (held_out, to_train))
    return Text(
        measured=measured,
        trained=trained,
        unit="byte" if encode is None else "token",
        needles=ByteNeedles() if encode is None else KeyNeedles(encode),
        pool=letters() if encode is None else _pool(measured),
        name=corpus.name,
        sha256=corpus.sha256,
        marks=marks or Marks(),
    )


def _ids(part: bytes, encode: Encode | None) -> Int[Tensor, " T"]:
    if not part:
        return torch.empty(0, dtype=torch.int64)
    if encode is None:
        return torch.frombuffer(bytearray(part), dtype=torch.uint8).long()
    return torch.tensor(list(encode(part[:MOST_BYTES].decode(errors="replace"))))


def _pool(ids: Int[Tensor, " T"]) -> Int[Tensor, " P"]:
    counts = torch.bincount(ids)
    known = int((counts > 0).sum())
    return counts.argsort(descending=True)[: min(POOL, known)]
