"""Pairs of sentences as subwords, in three parts, and the batches they come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.errors import DataError
from posenc.experiments.sequences import drawn, padded
from posenc.experiments.tasks.common.task import fingerprint, generator
from posenc.experiments.translation.parallel import Parallel
from posenc.experiments.translation.settings import TranslatorSettings
from posenc.experiments.translation.subwords import Subwords

__all__ = ["Data", "Sentence", "epoch_batches", "even_batches", "learnable"]

SHARE, MOST, FEWEST = 0.05, 500, 1
"""Validation and test: the share of each, and the pairs at most and at least."""

POOL = 50
"""Batches that are cut from one pool of pairs, sorted by length."""


@dataclass(frozen=True)
class Sentence:
    """A pair as subwords, and as it stands in the text."""

    source: Sequence[int]
    target: Sequence[int]
    line: str
    translation: str

    @property
    def width(self) -> int:
        """Tokens that each side takes in a batch."""
        return max(len(self.source), len(self.target)) + 1


@dataclass(frozen=True)
class Data:
    """All pairs.

    Args:
        train, validation, test: by the hash of the source, so that no sentence is in two.
        skipped: pairs that were left out: empty, over-long, or of unknown characters alone.
        fingerprint: of all of them, and of the vocabulary.
    """

    train: Sequence[Sentence]
    validation: Sequence[Sentence]
    test: Sequence[Sentence]
    skipped: int
    fingerprint: str

    @classmethod
    def of(cls, text: Parallel, subwords: Subwords, settings: TranslatorSettings) -> Data:
        """The pairs of a text.

        Raises:
            DataError: on a sentence that is too long, unless such are skipped; and when there
                are too few pairs.
        """
        sources = subwords.encode([source for source, _ in text.pairs])
        targets = subwords.encode([target for _, target in text.pairs])
        parts: tuple[list[Sentence], ...] = ([], [], [])
        skipped = text.skipped
        rows = zip(text.pairs, sources, targets, strict=True)
        for number, ((line, translation), source, target) in enumerate(rows, start=1):
            one = Sentence(source, target, line, translation)
            if one.width > settings.max_length + 1 and not settings.skip_bad:
                raise DataError(
                    "text",
                    expected=f"sentences of at most {settings.max_length} subwords in {text.name}",
                    got=f"{one.width - 1} in line {number}",
                    remedy="Raise --max-length, split it, or leave such pairs out (--skip-bad).",
                )
            if not (source and target) or one.width > settings.max_length + 1:
                skipped += 1
                continue
            parts[_part(line)].append(one)
        train, validation, test = parts
        for name, part in (("train on", train), ("validate with", validation), ("test", test)):
            if len(part) < FEWEST:
                raise DataError(
                    "text",
                    expected=f"pairs to {name}",
                    got=f"none of {len(text.pairs) - skipped} usable ones",
                    remedy="Give more text: a thousand pairs or more.",
                )
        mark = fingerprint(text.sha256, subwords.to_json(), settings.max_length, skipped)
        return cls(train, validation[:MOST], test[:MOST], skipped, mark)


def learnable(text: Parallel) -> Iterator[str]:
    """Lines of both languages that a vocabulary may be learned from: those trained on."""
    for pair in text.pairs:
        if _part(pair[0]) == 0:
            yield from pair


def epoch_batches(
    data: Sequence[Sentence], *, tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Every pair once, in batches of similar lengths and at most ``tokens`` a side.

    A pure function of its arguments: a training that goes on finds the same batches.

    Args:
        data: the pairs.
        tokens: in a batch, padding included.
        seed, epoch: of the order.
    """
    source = generator(seed, epoch)
    order = torch.randperm(len(data), generator=source).tolist()
    longest = max(one.width for one in data)
    size = POOL * max(1, tokens // longest)
    batches: list[list[int]] = []
    for begin in range(0, len(order), size):
        pool = sorted(order[begin : begin + size], key=lambda i: data[i].width)
        batches += _cut(data, pool, tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=source).tolist()]


def even_batches(data: Sequence[Sentence], *, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Every pair once, sorted by length, as tensors."""
    ranked = sorted(range(len(data)), key=lambda i: data[i].width)
    for rows in _cut(data, ranked, tokens):
        yield padded([(data[i].source, data[i].target) for i in rows])


def _cut(data: Sequence[Sentence], order: Sequence[int], tokens: int) -> list[list[int]]:
    """Consecutive pairs of ascending widths, as many as fit."""
    batches: list[list[int]] = []
    rows: list[int] = []
    for index in order:
        if rows and (len(rows) + 1) * data[index].width > tokens:
            batches.append(rows)
            rows = []
        rows.append(index)
    return [*batches, rows]


def _part(line: str) -> int:
    """0 to train on, 1 to validate with, 2 to test on."""
    place = drawn(line)
    if place < SHARE:
        return 2
    return 1 if place < 2 * SHARE else 0
