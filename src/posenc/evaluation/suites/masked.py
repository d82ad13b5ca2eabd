"""Measuring a model of masked tokens: loss by length and position, time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.evaluation.results import Metric, Reading
from posenc.evaluation.suites.next_token import BUDGET, FEWEST, MOST, bins_and_run, cost
from posenc.evaluation.texts import SpecialTokens, Text
from posenc.experiments.text_loss import Profile, restored
from posenc.training.seeding import generator

__all__ = ["MaskedSuite"]

RATE = 0.15
"""Of tokens that are masked, in what is scored and around it: BERT's."""


@dataclass(frozen=True, eq=False)
class MaskedSuite:
    """Measurements of models of masked tokens: the same tokens are masked for all.

    Args:
        text: ``[T]`` ids to read.
        masked: ``[T]``, those that are hidden wherever they are read.
        special: added to every text.
        lengths: of contexts, special tokens included; in all of them the tokens of the shortest are
            scored, in the middle.
        windows: for one number.
    """

    text: Int[Tensor, " T"]
    masked: Bool[Tensor, " T"]
    special: SpecialTokens
    lengths: tuple[int, ...]
    windows: int

    @classmethod
    def of(cls, text: Text, lengths: tuple[int, ...], *, seed: int) -> MaskedSuite:
        """The suite of a text, with the usual number of windows.

        Raises:
            DataError: when the text is too short.
            ArgumentError: when it is not known which id hides a token.
        """
        if text.special.mask is None:
            raise ArgumentError(
                "checkpoint",
                expected="a tokenizer with a token that hides others ([MASK] or <mask>)",
                got="one without",
                remedy="Save the tokenizer that the model was trained with into the folder.",
            )
        longest, ids = lengths[-1], text.measured
        if len(ids) < 4 * longest:
            raise DataError(
                "text",
                expected=f"at least {4 * longest} {text.unit}s, to test contexts of {longest}",
                got=len(ids),
                remedy="Give a longer text, or a smaller factor.",
            )
        masked = torch.rand(len(ids), generator=generator(seed)) < RATE
        windows = min(MOST, max(FEWEST, BUDGET // longest), len(ids) // longest)
        return cls(ids, masked, text.special, lengths, windows)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> Reading:
        """See ``Suite``. With a limit a context is cut to so many tokens around what is scored."""
        read = {length: min(length, limit or length) for length in self.lengths}
        bits = {length: self._bits(model, *self._middle(length)) for length in set(read.values())}
        longest = read[self.lengths[-1]]
        begins = len(self.special.begin)
        whole = self.lengths[-1] - self.special.count
        bins, run = bins_and_run(whole)
        count = max(1, self.windows // (bins + run))
        profile = Profile.spread(len(self.text), length=whole, bins=bins, run=run, count=count)
        profile = profile.shortened(longest - self.special.count)
        by_position = profile.curve(
            lambda rows: self._bits(model, rows[:, 1:], self.masked[rows[:, 1:]])
        )
        inputs = self.special.around(self.text[self._middle(longest)[0][:1]])
        spent = cost(model, inputs, count=longest)
        last = bits[longest].nanmean(1)
        return Reading(
            loss={length: float(bits[seen].nanmean()) for length, seen in read.items()},
            by_position=tuple((place + begins, value) for place, value in by_position),
            **spent._asdict(),
            windows=tuple(round(float(each), 5) for each in last[~last.isnan()]),
        )

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        count = int(self._middle(self.lengths[0])[1].sum())
        loss = Metric(
            key="loss",
            name="loss",
            axis=f"bits per masked {unit}",
            does=f"its loss is {{}} bits a masked {unit}",
            worse=f"costs {{}} bits a masked {unit} more",
            title="Loss by length",
            guide=f"The same {count:,} masked {unit}s at every length: a longer context only adds "
            "what stands on both sides of them. The dashed rule is the trained length. Click a "
            "name to single it out.",
            lower=True,
            percent=False,
        )
        return {
            "metrics": (loss,),
            "guide": f"Least loss at {self.lengths[-1]} first, in bits per masked {unit} on the "
            f"same {count:,} {unit}s at every length; {RATE:.0%} of all {unit}s are masked, drawn "
            "once.",
            "targets": count,
        }

    def _middle(self, length: int) -> tuple[Int[Tensor, "W L"], Bool[Tensor, "W L"]]:
        """Contexts of one length as indices of the text, and which tokens are scored."""
        shortest, own, longest = (
            each - self.special.count for each in (self.lengths[0], length, self.lengths[-1])
        )
        begins = torch.arange(self.windows) * (len(self.text) - longest) // self.windows
        middle = begins.unsqueeze(1) + (longest - shortest) // 2
        rows = begins.unsqueeze(1) + (longest - own) // 2 + torch.arange(own)
        inside = (rows >= middle) & (rows < middle + shortest)
        return rows, inside & self.masked[rows]

    def _bits(
        self, model: nn.Module, rows: Int[Tensor, "W L"], chosen: Bool[Tensor, "W L"]
    ) -> Tensor:
        """``[W, L]`` bits of the chosen tokens, NaN for others."""
        assert self.special.mask is not None  # ``of`` saw to it
        device = next(model.parameters()).device
        wanted = self.text[rows]
        inputs = self.special.around(wanted.masked_fill(self.masked[rows], self.special.mask))
        bits, _ = restored(
            lambda tokens: model(tokens.to(device)),
            inputs,
            self.special.around(wanted),
            self.special.around(chosen),
        )
        return bits[:, len(self.special.begin) : inputs.shape[1] - len(self.special.end)]
