"""Measurements of a causal model: loss, needles, copying, time and memory."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.lab.codec import from_plain
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.needles import DEPTHS, Needles, copying, shares_right
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.corpus import Pieces
from posenc.lab.experiments.text_loss import (
    Model,
    PositionProfile,
    Targets,
    at_device,
    losses,
    unigram_entropy,
)
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.machine import PeakMemory
from posenc.lab.training.seeding import generator

BUDGET = 1 << 16
"""Tokens read for one number."""

POSITION = "position"
"""Key of the loss of each segment of text by position, in ``StudyReading.pieces``."""

FEWEST, MOST = 8, 256
"""Windows for one number."""

BINS, RUN = 16, 8
"""Bins of the loss by position, and segments in a run; fewer for long contexts."""

FEWEST_PASSES, MOST_PASSES = 5, 40
PRECISION, PATIENCE = 0.05, 2.0
"""Passes are timed until half the interval of their median is at most this share of it, or for so
many seconds."""


class Suite(Protocol):
    """Measurements of one kind of model, the same for all."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The measured lengths, the requested one last."""

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """Measure one model.

        Args:
            model: the original or an extended one.
            limit: maximum input length; longer inputs are cut (images scaled) to it.
        """

    def facts(self, unit: str) -> dict[str, Any]:
        """Fields of a ``Study`` that describe the measurements, in this unit of length."""


@dataclass(frozen=True, eq=False)
class NextTokenSuite:
    """Measurements of causal models on the same tokens, needles and words.

    Args:
        text: ``[T]`` ids.
        pieces: that they consist of.
        lengths: of contexts; the same tokens are predicted in all of them.
        needles: how they are hidden.
        pool: ids that words to be copied consist of.
        seed: of needles and words.
        windows: for one number.
    """

    text: Int[Tensor, " T"]
    pieces: Pieces
    lengths: tuple[int, ...]
    needles: Needles
    pool: Int[Tensor, " P"]
    seed: int
    windows: int

    @classmethod
    def of(cls, text: Text, lengths: tuple[int, ...], *, seed: int) -> NextTokenSuite:
        """The suite of a text, with the default number of windows.

        Raises:
            DataError: if the text is too short.
        """
        require_text(len(text.measured), lengths[-1], text.unit)
        windows = min(MOST, max(FEWEST, BUDGET // lengths[-1]))
        return cls(
            text.measured, text.measured_pieces, lengths, text.needles, text.pool, seed, windows
        )

    @property
    def targets(self) -> Targets:
        """Tokens predicted at every length."""
        longest = self.lengths[-1]
        width = max(1, self.lengths[0] // 2)
        return Targets.spread(self.pieces, width=width, longest=longest, count=self.windows)

    def measure(self, model: nn.Module, *, limit: int | None = None) -> StudyReading:
        """See ``Suite``; ``limit`` is ignored, as causal models read texts of any length."""
        run, text, longest = at_device(model), self.text, self.lengths[-1]
        spent = cost(model, self._windows(longest, 1), count=longest)
        profile = profile_of(self.pieces, longest, self.windows)
        places = profile.segments(lambda rows: losses(run, text[rows], last=profile.length)).mean(2)
        by_position = zip(profile.middles, places.mean(0).tolist(), strict=True)
        reading = StudyReading(by_position=tuple(by_position), **spent._asdict())
        for length in self.lengths:
            reading = self._with(run, reading, length)
        at = {place * profile.width: rounded(values) for place, values in enumerate(places.T)}
        return replace(reading, pieces={**reading.pieces, POSITION: at})

    def further(
        self, model: nn.Module, reading: StudyReading, length: int
    ) -> tuple[NextTokenSuite, StudyReading]:
        """The suite and a reading with one more length between its first and last."""
        lengths = tuple(sorted({*self.lengths, length}))
        return replace(self, lengths=lengths), self._with(at_device(model), reading, length)

    def _with(self, run: Model, reading: StudyReading, length: int) -> StudyReading:
        """A reading with the measurements at one more length."""
        bits = self.targets.each(run, self.text, length).mean(1)
        needles = self._needles(run, length)

        def added(values: Mapping[int, Any], value: Any) -> dict[int, Any]:
            return dict(sorted({**values, length: value}.items()))

        return replace(
            reading,
            loss=added(reading.loss, float(bits.mean())),
            needles=added(reading.needles, tuple(needles.mean(1).tolist())),
            copied=added(reading.copied, self._copied(run, length)),
            pieces={
                **reading.pieces,
                "loss": added(reading.pieces.get("loss", {}), rounded(bits)),
                "needles": added(reading.pieces.get("needles", {}), rounded(needles.flatten())),
            },
        )

    @property
    def asked(self) -> int:
        """Needles per depth and length."""
        return max(FEWEST, self.windows // 4)

    def _windows(self, length: int, count: int) -> Int[Tensor, "W L"]:
        spread = Targets.spread(self.pieces, width=1, longest=self.lengths[-1], count=count)
        return spread.windows(self.text, length)[:, 1:]

    def _needles(self, run: Model, length: int) -> Float[Tensor, "D W"]:
        """1 for each needle found, by depth."""
        windows = self._windows(length, self.asked)
        shares = []
        for index, depth in enumerate(DEPTHS):
            hidden, answers = self.needles.hide(windows, depth, generator(self.seed, length, index))
            shares.append(shares_right(run, hidden, answers, exact=True))
        return torch.stack(shares)

    def _copied(self, run: Model, length: int) -> float:
        windows = self._windows(length, self.windows)
        rows, answers = copying(windows, self.pool, generator(self.seed, length))
        return float(shares_right(run, rows, answers, exact=False).mean())

    def facts(self, unit: str) -> dict[str, Any]:
        """See ``Suite``."""
        targets = self.targets
        count = len(targets.ends) * targets.width
        named = words(
            "next_token",
            unit=unit,
            goal=self.lengths[-1],
            count=count,
            depths=len(DEPTHS),
            asked=self.asked,
        )
        return named | {
            "depths": DEPTHS,
            "needles": self.needles.description,
            "chance": self.needles.chance,
            "copy_chance": 1 / len(self.pool),
            "trivial": unigram_entropy(self.text, targets.places),
            "trivial_rule": f"{unit} frequencies",
            "targets": count,
            "asked": self.asked,
        }


class PassCost(NamedTuple):
    """Time and memory of a pass.

    Args:
        per_second: items per second, by the median time.
        time_error: half the 95 % interval of that median, relative to it.
        peak_memory_bytes: beyond the process before the passes.
    """

    per_second: float
    time_error: float
    peak_memory_bytes: int


@torch.inference_mode()
def cost(model: nn.Module, inputs: Tensor, *, count: int) -> PassCost:
    """Time and memory of a pass, repeated until its time is precise.

    Args:
        model: to run.
        inputs: of a pass.
        count: items in them.
    """
    device = next(model.parameters()).device
    inputs = inputs.to(device)
    model(inputs)
    memory = PeakMemory(device)
    times: list[float] = []
    while len(times) < FEWEST_PASSES or not (
        spread(times) <= PRECISION or len(times) >= MOST_PASSES or sum(times) > PATIENCE
    ):
        begin = time.perf_counter()
        model(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return PassCost(count / median(times), spread(times), memory.used())


def spread(times: Sequence[float]) -> float:
    """Half the 95 % interval of the median by ranks (the range of fewer than six), relative."""
    ranked, count = sorted(times), len(times)
    cut = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return (ranked[count - 1 - cut] - ranked[cut]) / 2 / median(times)


def rounded(values: Tensor) -> tuple[float, ...]:
    """Values of pieces, as they are kept."""
    return tuple(round(value, 5) for value in values.tolist())


def require_text(size: int, longest: int, unit: str) -> None:
    """Require a text of four times the longest context.

    Raises:
        DataError: if it is shorter.
    """
    if size < 4 * longest:
        raise DataError(
            "text",
            expected=f"at least {4 * longest} {unit}s, to test contexts of {longest}",
            got=size,
            remedy="Give a longer text, or ask for shorter contexts.",
        )


def profile_of(pieces: Pieces, longest: int, windows: int) -> PositionProfile:
    """Segments of a text for the loss by position in the longest context."""
    few = BUDGET // longest < BINS + RUN
    bins, run = (BINS // 2, RUN // 4) if few else (BINS, RUN)
    count = max(1, windows // (bins + run))
    return PositionProfile.spread(pieces, length=longest, bins=bins, run=run, count=count)


def lengths_to(length: int, factor: float) -> tuple[int, ...]:
    """Half the trained length, the length itself, its doubles, and ``factor`` times it."""
    goal = round(length * factor)
    doubles = [length]
    while doubles[-1] * 2 < goal:
        doubles.append(doubles[-1] * 2)
    return tuple(dict.fromkeys([length // 2, *doubles, goal]))


def words(suite: str, **values: object) -> dict[str, Any]:
    """The fields ``guide`` and ``metrics`` of a ``Study``, with placeholders filled in."""
    table = tomllib.loads((files(__package__) / "metrics.toml").read_text(encoding="utf-8"))[suite]

    def filled(fields: dict[str, Any]) -> dict[str, Any]:
        return {n: v.format(**values) if isinstance(v, str) else v for n, v in fields.items()}

    metrics = tuple(from_plain(Metric, filled(metric)) for metric in table["metrics"])
    return {"guide": table["guide"].format(**values), "metrics": metrics}
