"""Sequences that an encoder–decoder reads and writes, as batches, and the division of examples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posenc.errors import DataError
from posenc.lab.experiments.results import Corpus
from posenc.layout import Layout
from posenc.models import Transformer, token_loss
from posenc.models.transformer import Given

BEGIN, END, SYMBOLS = 0, 1, 2
"""Tokens: what begins a target, what ends both sides, and the first of the symbols."""


def drawn(name: str) -> float:
    """A number from 0 to 1 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def padded(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
    """Pairs of source and target symbols as a batch.

    ``source`` and ``target`` are ``[B, L]``, padded on the right: sources end with the end,
    targets begin with the begin and end with the end. ``sizes`` ``[B, 2]`` counts their tokens.
    """
    sources = [[*source, END] for source, _ in pairs]
    targets = [[BEGIN, *target, END] for _, target in pairs]
    sizes = [[len(a), len(b)] for a, b in zip(sources, targets, strict=True)]
    return {
        "source": stacked(sources, END),
        "target": stacked(targets, END),
        "sizes": torch.tensor(sizes),
    }


def pair_loss(model: Transformer, batch: Mapping[str, Tensor], *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of a target's token after those before it.

    Args:
        model: the encoder–decoder.
        batch: as ``padded`` makes it.
        smoothing: see ``token_loss``.
    """
    source, target, sizes = batch["source"], batch["target"], batch["sizes"]
    inputs, wanted = target[:, :-1], target[:, 1:]
    layout = real(inputs.shape[1], sizes[:, 1] - 1)
    logits = model(source, inputs, real(source.shape[1], sizes[:, 0]), layout)
    return token_loss(logits, wanted, valid=layout.valid, smoothing=smoothing)


def read_source(model: Transformer, sources: Sequence[Sequence[int]]) -> Given:
    """The model's decoder with sources of any lengths in view."""
    device = model.source_embedding.weight.device
    ended = [[*source, END] for source in sources]
    tokens = stacked(ended, END).to(device)
    sizes = torch.tensor([len(source) for source in ended], device=device)
    return model.given(tokens, real(tokens.shape[1], sizes))


def stacked(rows: Sequence[Sequence[int]], fill: int) -> Int[Tensor, "B L"]:
    """Rows of any lengths as one tensor, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def real(length: int, sizes: Int[Tensor, " B"]) -> Layout:
    """Tokens at 0, 1, 2, … in every row, of which the first ``sizes`` are real."""
    valid: Bool[Tensor, "B L"] = torch.arange(length, device=sizes.device) < sizes.unsqueeze(1)
    return replace(Layout.sequence(length, device=sizes.device), valid=valid)


MOST, FEWEST = 512, 16
"""Examples tested at a length, and how many there must be for a number to mean something."""


class NamedExample(Protocol):
    """An example of a task.

    Attributes:
        name: decides by its hash whether it is held out.
        length: in symbols or words.
    """

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...


E = TypeVar("E", bound=NamedExample)


@dataclass(frozen=True)
class Split(Generic[E]):
    """Examples to train on, and to test on at each length.

    Args:
        train: of the training length at most.
        tests: length to examples, ascending; the first is the training length.
    """

    train: Sequence[E]
    tests: Mapping[int, Sequence[E]]

    @classmethod
    def of(
        cls,
        examples: Sequence[E],
        lengths: Sequence[int],
        *,
        held_out: float,
        most: int = MOST,
        unit: str = "symbols",
    ) -> Split[E]:
        """The split by the hashes of the examples' names.

        At each length but the first are tested those that are longer than the length before.

        Args:
            examples: all of them; those of one name fall into one part.
            lengths: ascending, the training length first.
            held_out: share of the short ones that is not trained on.
            most: number of examples tested at a length, at most.
            unit: of the lengths, for the error.

        Raises:
            DataError: when there is nothing to train on, or to test on at the training length.
        """
        place = {example.name: drawn(example.name) for example in examples}
        ranked = sorted(examples, key=lambda example: (place[example.name], example.name))
        short = [example for example in ranked if example.length <= lengths[0]]
        train = [example for example in short if place[example.name] >= held_out]
        tests = {lengths[0]: [e for e in short if place[e.name] < held_out][:most]}
        for before, length in pairwise(lengths):
            tests[length] = [e for e in ranked if before < e.length <= length][:most]
        if len(train) < FEWEST or len(tests[lengths[0]]) < FEWEST:
            raise DataError(
                "text",
                expected=f"at least {FEWEST} examples of at most {lengths[0]} {unit} to train on, "
                f"and {FEWEST} held out",
                got=f"{len(train)} and {len(tests[lengths[0]])}",
                remedy="Give more text, or a longer train_length.",
            )
        return cls(train, tests)

    def corpus(self, *, name: str, sha256: str, files: int, unit: str) -> Corpus:
        """The record of the data, with the numbers of examples."""
        return Corpus(
            name=name,
            sha256=sha256,
            files=files,
            train_bytes=len(self.train),
            held_out_bytes=sum(map(len, self.tests.values())),
            unit=unit,
        )
