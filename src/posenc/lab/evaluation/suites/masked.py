"""Measurements of a masked language model: loss by length and position, time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.next_token import (
    BUDGET,
    FEWEST,
    MOST,
    cost,
    profile_of,
    require_text,
    rounded,
    words,
)
from posenc.lab.evaluation.texts import SpecialTokens, Text
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import at_device, restored, unigram_entropy
from posenc.lab.training.seeding import generator

RATE = 0.15
"""Share of masked tokens, as in BERT."""


@dataclass(frozen=True, eq=False)
class MaskedSuite:
    """Measurements of masked language models on the same masked tokens.

    Args:
        text: ``[T]`` ids.
        pieces: that they consist of.
        masked: ``[T]``, tokens hidden wherever they are read.
        special: added to every text.
        lengths: of contexts, special tokens included; in all of them the tokens of the shortest, in
            the middle, are scored.
        windows: for one number.
    """

    text: Int[Tensor, " T"]
    pieces: Pieces
    masked: Bool[Tensor, " T"]
    special: SpecialTokens
    lengths: tuple[int, ...]
    windows: int

    @classmethod
    def of(cls, text: Text, lengths: tuple[int, ...], *, seed: int) -> MaskedSuite:
        """The suite of a text, with the default number of windows.

        Raises:
            DataError: if the text is too short.
            ArgumentError: if there is no mask token.
        """
        if text.special.mask is None:
            raise ArgumentError(
                "checkpoint",
                expected="a tokenizer with a token that hides others ([MASK] or <mask>)",
                got="one without",
                remedy="Save the tokenizer that the model was trained with into the folder.",
            )
        longest, ids = lengths[-1], text.measured
        require_text(len(ids), longest, text.unit)
        masked = torch.rand(len(ids), generator=generator(seed)) < RATE
        windows = min(MOST, max(FEWEST, BUDGET // longest), len(ids) // longest)
        return cls(ids, text.measured_pieces, masked, text.special, lengths, windows)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; contexts are cut to ``limit`` tokens around the scored ones."""
        read = {length: min(length, limit or length) for length in self.lengths}
        bits = {length: self._bits(model, *self._middle(length)) for length in set(read.values())}
        longest = read[self.lengths[-1]]
        begins = len(self.special.begin)
        context = self.lengths[-1] - self.special.count
        profile = profile_of(self.pieces, context, self.windows)
        by_position = profile.shortened(longest - self.special.count).curve(
            lambda rows: self._bits(model, rows[:, 1:], self.masked[rows[:, 1:]])
        )
        inputs = self.special.around(self.text[self._middle(longest)[0][:1]])
        spent = cost(model, inputs, count=longest)
        means = {length: bits[scored].nanmean(1) for length, scored in read.items()}
        return StudyReading(
            loss={length: float(bits[scored].nanmean()) for length, scored in read.items()},
            by_position=tuple((at + begins, bits) for at, bits in by_position if bits == bits),
            **spent._asdict(),
            pieces={"loss": {n: rounded(values[~values.isnan()]) for n, values in means.items()}},
        )

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        rows, chosen = self._middle(self.lengths[0])
        count = int(chosen.sum())
        named = words("masked", unit=unit, goal=self.lengths[-1], count=count, rate=RATE)
        return named | {
            "targets": count,
            "trivial": unigram_entropy(self.text, rows[chosen]),
            "trivial_rule": f"{unit} frequencies",
        }

    def _middle(self, length: int) -> tuple[Int[Tensor, "W L"], Bool[Tensor, "W L"]]:
        """Contexts as indices of the text, and which tokens are scored."""
        shortest, context, longest = (
            size - self.special.count for size in (self.lengths[0], length, self.lengths[-1])
        )
        last_start = self.pieces.count(longest) - 1
        begins = self.pieces.begins(
            torch.arange(self.windows) * last_start // self.windows, longest
        )
        middle = begins.unsqueeze(1) + (longest - shortest) // 2
        rows = begins.unsqueeze(1) + (longest - context) // 2 + torch.arange(context)
        inside = (rows >= middle) & (rows < middle + shortest)
        return rows, inside & self.masked[rows]

    def _bits(
        self, model: nn.Module, rows: Int[Tensor, "W L"], chosen: Bool[Tensor, "W L"]
    ) -> Tensor:
        """``[W, L]`` bits of the chosen tokens, NaN for others."""
        assert self.special.mask is not None  # checked in ``of``
        wanted = self.text[rows]
        inputs = self.special.around(wanted.masked_fill(self.masked[rows], self.special.mask))
        bits, _ = restored(
            at_device(model), inputs, self.special.around(wanted), self.special.around(chosen)
        )
        return bits[:, len(self.special.begin) : inputs.shape[1] - len(self.special.end)]
