"""Pairs of sentences as subwords, in three parts, and the batches they come in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from examples.translation.settings import Settings
from posenc.errors import DataError
from posenc.lab.experiments.sequences import Parallel, Subwords, drawn, padded, pair_loss
from posenc.lab.training.seeding import fingerprint, generator
from posenc.models import Transformer

__all__ = ["Batches", "Data", "Sentence", "epoch_batches", "even_batches", "learnable"]

SHARE, MOST = 0.05, 500
"""Validation and test: the share of each, and the pairs at most."""

POOL = 50
"""Batches that are cut from one pool of pairs, sorted by length."""


@dataclass(frozen=True)
class Sentence:
    """A pair as subwords, and as text."""

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
        skipped: number of pairs left out: empty, over-long, or of unknown characters alone.
        fingerprint: of all of them, and of the vocabulary.
    """

    train: Sequence[Sentence]
    validation: Sequence[Sentence]
    test: Sequence[Sentence]
    skipped: int
    fingerprint: str

    @classmethod
    def of(cls, text: Parallel, subwords: Subwords, settings: Settings) -> Data:
        """Split the pairs of a text.

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
            pair = Sentence(source, target, line, translation)
            too_long = pair.width > settings.max_length + 1
            if too_long and not settings.skip_bad:
                raise DataError(
                    "text",
                    expected=f"sentences of at most {settings.max_length} subwords in {text.name}",
                    got=f"{pair.width - 1} in line {number}",
                    remedy="Raise --max-length, split it, or leave such pairs out (--skip-bad).",
                )
            if too_long or not (source and target):
                skipped += 1
            else:
                parts[_part(line)].append(pair)
        for name, part in zip(("train on", "validate with", "test"), parts, strict=True):
            if not part:
                raise DataError(
                    "text",
                    expected=f"pairs to {name}",
                    got=f"none of {len(text.pairs) - skipped} usable ones",
                    remedy="Give more text: a thousand pairs or more.",
                )
        train, validation, test = parts
        mark = fingerprint(text.sha256, subwords.to_json(), settings.max_length, skipped)
        return cls(train, validation[:MOST], test[:MOST], skipped, mark)


class Batches:
    """Objective of ``posenc.lab.training.fit``: every pair once an epoch, in batches of one length.

    Args:
        data: the pairs.
        settings: size of batches, label smoothing.
    """

    def __init__(self, data: Data, settings: Settings) -> None:
        self.pairs, self.fingerprint = data.train, data.fingerprint
        self.tokens_per_step, self.smoothing = settings.batch_tokens, settings.smoothing
        self._epoch, self._first, self._batches = -1, 0, list[list[int]]()

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """As ``padded`` makes it."""
        if step < self._first:
            self._epoch, self._first, self._batches = -1, 0, []
        while step >= self._first + len(self._batches):
            self._epoch, self._first = self._epoch + 1, self._first + len(self._batches)
            self._batches = epoch_batches(
                self.pairs, tokens=self.tokens_per_step, seed=seed, epoch=self._epoch
            )
        rows = [self.pairs[index] for index in self._batches[step - self._first]]
        return padded([(pair.source, pair.target) for pair in rows])

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Mean cross-entropy of the targets' tokens, smoothed, in nats."""
        return pair_loss(cast(Transformer, model), batch, smoothing=self.smoothing)


def learnable(text: Parallel) -> Iterator[str]:
    """Lines of both languages that a vocabulary may be learned from: those trained on."""
    for pair in text.pairs:
        if _part(pair[0]) == 0:
            yield from pair


def epoch_batches(
    data: Sequence[Sentence], *, tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Every pair once, in batches of similar lengths and at most ``tokens`` a side."""
    source = generator(seed, epoch)
    order = torch.randperm(len(data), generator=source).tolist()
    size = POOL * max(1, tokens // max(pair.width for pair in data))
    batches: list[list[int]] = []
    for begin in range(0, len(order), size):
        pool = sorted(order[begin : begin + size], key=lambda index: data[index].width)
        batches += _cut(data, pool, tokens)
    return [batches[index] for index in torch.randperm(len(batches), generator=source).tolist()]


def even_batches(data: Sequence[Sentence], *, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Every pair once, sorted by length, as tensors."""
    ranked = sorted(range(len(data)), key=lambda index: data[index].width)
    for rows in _cut(data, ranked, tokens):
        yield padded([(data[index].source, data[index].target) for index in rows])


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
    return 2 if place < SHARE else int(place < 2 * SHARE)
