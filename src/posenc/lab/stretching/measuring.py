"""Measuring one model: loss by length and position, needles, copying, time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.lab.machine import PeakMemory
from posenc.lab.measure import Profile, Targets
from posenc.lab.seeding import generator
from posenc.lab.stretching.probes import DEPTHS, Needles, copying, share_right
from posenc.lab.stretching.results import Reading

__all__ = ["Ruler", "lengths_to"]

Model = Callable[[Tensor], Tensor]

BUDGET = 1 << 16
"""Tokens that are read for one number, in windows of whatever length."""

FEWEST, MOST = 8, 256
"""Windows for one number."""

BINS, RUN = 16, 8
"""Of the loss by position; fewer where contexts are long."""


@dataclass(frozen=True, eq=False)
class Ruler:
    """What every model is measured with: the same tokens, needles and words for all.

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
    ) -> Ruler:
        """A ruler of the usual number of windows.

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

    def measure(self, model: nn.Module, *, steps: int = 0, seconds: float = 0.0) -> Reading:
        """All that is measured of one model."""
        device = next(model.parameters()).device
        longest = self.lengths[-1]

        def run(tokens: Tensor) -> Tensor:
            output: Tensor = model(tokens.to(device))
            return output

        text = self.text
        speed, memory = self._cost(model, device)
        targets = self.targets
        bits = {length: targets.each(run, text, length) for length in self.lengths}
        few = BUDGET // longest < BINS + RUN
        bins, row = (BINS // 2, RUN // 4) if few else (BINS, RUN)
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
            tokens_per_second=speed,
            peak_memory_bytes=memory,
            steps=steps,
            seconds=seconds,
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

    @torch.inference_mode()
    def _cost(self, model: nn.Module, device: torch.device) -> tuple[float, int]:
        """Tokens a second and bytes of a pass over one context of the longest length."""
        tokens = self._windows(self.lengths[-1], 1).to(device)
        model(tokens)
        memory = PeakMemory(device)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            model(tokens)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        return tokens.numel() / sorted(times)[1], memory.used()


def lengths_to(length: int, factor: float) -> tuple[int, ...]:
    """Half the trained length, itself, its doubles, and what ``factor`` makes of it."""
    goal = round(length * factor)
    doubles = [length]
    while doubles[-1] * 2 < goal:
        doubles.append(doubles[-1] * 2)
    return tuple(dict.fromkeys([length // 2, *doubles, goal]))
