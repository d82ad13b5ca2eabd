"""Measuring a model of the next token: loss, needles, copying, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.evaluation.results import Metric, Reading
from posenc.evaluation.suites.needles import DEPTHS, Needles, copying, share_right
from posenc.experiments.text_loss import Profile, Targets
from posenc.training.machine import PeakMemory
from posenc.training.seeding import generator

__all__ = [
    "BUDGET",
    "FEWEST",
    "MOST",
    "Cost",
    "NextTokenSuite",
    "Suite",
    "bins_and_run",
    "cost",
    "lengths_to",
]

Model = Callable[[Tensor], Tensor]

BUDGET = 1 << 16
"""Tokens that are read for one number, in windows of whatever length."""

FEWEST, MOST = 8, 256
"""Windows for one number."""

BINS, RUN = 16, 8
"""Of the loss by position; fewer where contexts are long."""


FEWEST_PASSES, MOST_PASSES = 5, 40
KNOWN, PATIENCE = 0.05, 2.0
"""Passes are timed until half the interval of their median is so small a share of it, or so many
seconds are over."""


class Suite(Protocol):
    """Measurements of one kind of model, the same for all."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that are measured, the one asked for last."""

    def measure(self, model: nn.Module, *, limit: int | None = None) -> Reading:
        """Measure one model.

        Args:
            model: stretched, or not.
            limit: the longest input that the model is given; longer ones are cut to it (images
                scaled to it).
        """

    def facts(self, unit: str) -> dict[str, Any]:
        """Fields of a ``Study`` that say what was measured, for tokens that are called so."""


@dataclass(frozen=True, eq=False)
class NextTokenSuite:
    """Measurements of causal models: the same tokens, needles and words for all.

    Args:
        text: ``[T]`` ids to read.
        lengths: of contexts; the longest decides what tokens are predicted.
        needles: how they are hidden.
        pool: ids that words to be copied are made of.
        seed: of needles and words.
        windows: for one number.
    """

    text: Int[Tensor, " T"]
    lengths: tuple[int, ...]
    needles: Needles
    pool: Int[Tensor, " P"]
    seed: int
    windows: int

    @classmethod
    def of(
        cls,
        text: Int[Tensor, " T"],
        lengths: tuple[int, ...],
        needles: Needles,
        pool: Int[Tensor, " P"],
        *,
        seed: int,
    ) -> NextTokenSuite:
        """The suite of a text, with the usual number of windows.

        Raises:
            DataError: when the text is too short.
        """
        longest = lengths[-1]
        least = 4 * longest
        if len(text) < least:
            raise DataError(
                "text",
                expected=f"at least {least} tokens, to test contexts of {longest}",
                got=len(text),
                remedy="Give a longer text, or a smaller factor.",
            )
        windows = min(MOST, max(FEWEST, BUDGET // longest))
        return cls(text, lengths, needles, pool, seed, windows)

    @property
    def targets(self) -> Targets:
        """Tokens that are predicted at every length."""
        longest = self.lengths[-1]
        width = max(1, self.lengths[0] // 2)
        return Targets.spread(len(self.text), width=width, longest=longest, count=self.windows)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> Reading:
        """See ``Suite``. There is no limit: every causal model reads texts of any length."""
        device = next(model.parameters()).device
        longest = self.lengths[-1]

        def run(tokens: Tensor) -> Tensor:
            output: Tensor = model(tokens.to(device))
            return output

        text = self.text
        spent = cost(model, self._windows(longest, 1), count=longest)
        targets = self.targets
        bits = {length: targets.each(run, text, length) for length in self.lengths}
        bins, row = bins_and_run(longest)
        profile = Profile.spread(
            len(text),
            length=longest,
            bins=bins,
            run=row,
            count=max(1, self.windows // (bins + row)),
        )
        return Reading(
            loss={length: float(each.mean()) for length, each in bits.items()},
            by_position=tuple(profile.loss(run, text)),
            needles={length: self._needles(run, length) for length in self.lengths},
            copied={length: self._copied(run, length) for length in self.lengths},
            **spent._asdict(),
            windows=tuple(round(float(each), 5) for each in bits[longest].mean(1)),
        )

    @property
    def asked(self) -> int:
        """Needles for each depth and length."""
        return max(FEWEST, self.windows // 4)

    def _windows(self, length: int, count: int) -> Int[Tensor, "W L"]:
        spread = Targets.spread(len(self.text), width=1, longest=self.lengths[-1], count=count)
        return spread.windows(self.text, length)[:, 1:]

    def _needles(self, run: Model, length: int) -> tuple[float, ...]:
        windows = self._windows(length, self.asked)
        found = []
        for index, depth in enumerate(DEPTHS):
            hidden, answers = self.needles.hide(windows, depth, generator(self.seed, length, index))
            found.append(share_right(run, hidden, answers, whole=True))
        return tuple(found)

    def _copied(self, run: Model, length: int) -> float:
        windows = self._windows(length, self.windows)
        whole, answers = copying(windows, self.pool, generator(self.seed, length))
        return share_right(run, whole, answers, whole=False)

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        targets = self.targets
        count = len(targets.ends) * targets.width
        loss = Metric(
            key="loss",
            name="loss",
            axis=f"bits per {unit}",
            does=f"its loss is {{}} bits a {unit}",
            worse=f"costs {{}} bits a {unit} more",
            title="Loss by length",
            guide=f"The same {count:,} {unit}s at every length: a longer context only adds what "
            "stands before them. The dashed rule is the trained length. Click a name to single "
            "it out.",
            lower=True,
            percent=False,
        )
        found = Metric(
            key="needles",
            name="needles found",
            axis="share found",
            does="it finds {} of the needles",
        )
        copied = Metric(
            key="copied",
            name="copied",
            axis="share copied",
            does="it copies {}",
            title="Copying what is near",
            guide="A random word of 16 stands twice at the end of a context: how much of the "
            "second is foreseen? It shows whether stretching has blurred near distances.",
            brief=True,
        )
        return {
            "metrics": (loss, found, copied),
            "guide": f"Least loss at {self.lengths[-1]} first. Losses are bits per {unit} on the "
            f"same {count:,} {unit}s at every length; needles are the share found over "
            f"{len(DEPTHS)} depths; one seed, {self.asked} needles a depth and length.",
            "depths": DEPTHS,
            "needles": self.needles.description,
            "chance": self.needles.chance,
            "copy_chance": 1 / len(self.pool),
            "targets": count,
            "asked": self.asked,
        }


class Cost(NamedTuple):
    """Time and memory of a pass.

    Args:
        per_second: what was read, by the seconds of the median pass.
        time_error: half the 95 % interval of that median, as a share of it.
        peak_memory_bytes: which the passes took beyond the process before them.
    """

    per_second: float
    time_error: float
    peak_memory_bytes: int


@torch.inference_mode()
def cost(model: nn.Module, inputs: Tensor, *, count: int) -> Cost:
    """Time and memory of a pass over some inputs, repeated until its time is known well enough.

    Args:
        model: run.
        inputs: of a pass.
        count: of what is read in it.
    """
    device = next(model.parameters()).device
    inputs = inputs.to(device)
    model(inputs)
    memory = PeakMemory(device)
    times: list[float] = []
    while len(times) < FEWEST_PASSES or not (
        _spread(times) <= KNOWN or len(times) >= MOST_PASSES or sum(times) > PATIENCE
    ):
        begin = time.perf_counter()
        model(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return Cost(count / median(times), _spread(times), memory.used())


def _spread(times: Sequence[float]) -> float:
    """Half the 95 % interval of the median, by ranks, as a share of the median.

    With fewer than six times the interval is that from the least to the most.
    """
    ranked, count = sorted(times), len(times)
    cut = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return (ranked[count - 1 - cut] - ranked[cut]) / 2 / median(times)


def bins_and_run(longest: int) -> tuple[int, int]:
    """Of the loss by position."""
    few = BUDGET // longest < BINS + RUN
    return (BINS // 2, RUN // 4) if few else (BINS, RUN)


def lengths_to(length: int, factor: float) -> tuple[int, ...]:
    """Half the trained length, itself, its doubles, and what ``factor`` makes of it."""
    goal = round(length * factor)
    doubles = [length]
    while doubles[-1] * 2 < goal:
        doubles.append(doubles[-1] * 2)
    return tuple(dict.fromkeys([length // 2, *doubles, goal]))
