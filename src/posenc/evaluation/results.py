"""Results of measuring stretched models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.codec import to_plain
from posenc.experiments.statistics import Estimate

__all__ = ["Claimed", "Findings", "Metric", "Reading", "Study"]


TIMED = 0.2
"""Times whose interval is wider, to either side, are not compared."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that is measured at every length, and the words around it.

    Args:
        key: the field of ``Reading`` that has it.
        name: in tables and sentences.
        axis: of its chart, with the unit.
        title, guide: of its chart; without a title there is none.
        does: what a model does, of the amount ``{}``: "it finds {} of the needles".
        worse: what a worse one does, of the difference ``{}``: "costs {} bits more".
        lower: whether less is better.
        percent: whether it is told in per cent.
        brief: whether tables have it at the first and the last length only.
    """

    key: str
    name: str
    axis: str
    does: str
    worse: str = ""
    title: str = ""
    guide: str = ""
    lower: bool = False
    percent: bool = True
    brief: bool = False

    def shown(self, value: float) -> str:
        """A value as tables have it."""
        return f"{value:.0%}" if self.percent else f"{value:.3f}"

    def told(self, value: float) -> str:
        """A value in a sentence."""
        return self.does.format(self.shown(value))

    def difference(self, found: Estimate) -> str:
        """How much worse a model is, with the interval."""
        factor, places = (100, 1) if self.percent else (1, 3)
        half = factor * (found.half_width or 0.0)
        return self.worse.format(f"{factor * found.mean:.{places}f} ± {half:.{places}f}")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All that was measured of one model; what was not is empty.

    Args:
        loss: length → bits a token, on the same tokens at every length: of all of them in models
            of the next token, of masked ones in models of these.
        by_position: (position, bits a token) in the longest context, the same tokens at each.
        needles: length → share found at each of ``Study.depths``.
        copied: length → share of a repeated word's tokens that is copied.
        right: size → share of images that is classified as their labels say.
        agreement: size → share of images that is classified as by the original at its own size.
        cosine: size → mean cosine of an image's features with those of the original at its own
            size.
        per_second: tokens (images) of one pass over the longest context (largest size).
        time_error: half the 95 % interval of the time of that pass, as a share of it.
        peak_memory_bytes: which that pass took beyond the process before it.
        steps: of fine-tuning that came before.
        seconds: which these took.
        windows: what the deciding metric at the longest is the mean of: a value for each stretch
            of text, document or image.
    """

    loss: Mapping[int, float] = field(default_factory=dict)
    by_position: tuple[tuple[float, float], ...] = ()
    needles: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    copied: Mapping[int, float] = field(default_factory=dict)
    right: Mapping[int, float] = field(default_factory=dict)
    agreement: Mapping[int, float] = field(default_factory=dict)
    cosine: Mapping[int, float] = field(default_factory=dict)
    per_second: float
    peak_memory_bytes: int
    steps: int = 0
    seconds: float = 0.0
    windows: tuple[float, ...] = ()
    time_error: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; NaN (where no token was scored) is null."""
        plain = to_plain(self)
        plain["loss"] = {n: None if math.isnan(bits) else bits for n, bits in self.loss.items()}
        plain["by_position"] = [
            (place, None if math.isnan(bits) else bits) for place, bits in self.by_position
        ]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any] | None) -> Reading | None:
        """The reading of ``to_json``; None for None."""
        if plain is None:
            return None
        values: dict[str, Any] = {
            name: {int(n): math.nan if number is None else number for n, number in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in plain.items()
        }
        values["needles"] = {n: tuple(shares) for n, shares in values["needles"].items()}
        values["by_position"] = tuple(
            (place, math.nan if bits is None else bits) for place, bits in values["by_position"]
        )
        values["windows"] = tuple(values["windows"])
        return cls(**values)

    @property
    def timed(self) -> bool:
        """Whether its time is known well enough to compare."""
        return self.time_error <= TIMED

    @property
    def speed(self) -> str:
        """``per_second`` as tables have it, with a mark where it is not well known."""
        return f"{'' if self.timed else '≈ '}{self.per_second:,.0f}"

    def found(self, length: int) -> float:
        """Share of the needles found in contexts of one length, at whatever depth."""
        shares = self.needles[length]
        return sum(shares) / len(shares)

    def of(self, metric: Metric) -> Mapping[int, float]:
        """Length → value."""
        if metric.key == "needles":
            return {length: self.found(length) for length in self.needles}
        values: Mapping[int, float] = getattr(self, metric.key)
        return values


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """Claims of a method.

    Args:
        summary, expect, training, cost: see ``Extension``.
        transformers: the ``rope_type`` that transformers knows it by.
        decodes_as_whole: see ``ExtensionClaims``.
        cite: authors, year and title.
    """

    summary: str
    expect: str
    training: str
    cost: str
    transformers: str | None
    decodes_as_whole: bool
    cite: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of one method.

    Args:
        key: as it was written; ``direct`` and ``window`` are the baselines.
        role: ``"method"`` or ``"baseline"``.
        claims: of its parts.
        advice: what to know before it is used like this.
        refusal: why there is nothing.
        writable: whether a checkpoint can hold it.
        served: the ``rope_type`` that transformers runs it as; empty: only posenc runs it.
        untuned: as it is; None where that is refused.
        tuned: after fine-tuning; None where there was none.
        failed: why not, where there should have been.
    """

    key: str
    role: str
    claims: tuple[Claimed, ...] = ()
    advice: tuple[str, ...] = ()
    refusal: str = ""
    writable: bool = False
    served: str = ""
    untuned: Reading | None = None
    tuned: Reading | None = None
    failed: str = ""

    def reading(self, tuned: bool) -> Reading | None:
        """After fine-tuning or before."""
        return self.tuned if tuned else self.untuned


@dataclass(frozen=True, kw_only=True)
class Study:
    """A checkpoint stretched by several methods, or measured as it is.

    Args:
        checkpoint: name of its folder.
        family: ``model_type``.
        parameters: of the model.
        length: it was trained at.
        factor: 1 where nothing was stretched.
        lengths: of the contexts that were measured, the one that was asked for last; of images the
            longer side in pixels.
        metrics: what was measured, the deciding one first.
        unit: what lengths are counted in: ``"byte"``, ``"token"`` or ``"pixel"``.
        guide: how to read the table.
        text: what was read (shown), in a phrase.
        sha256: of it.
        sample: what ``Reading.windows`` has a value for, in the plural.
        counted: what ``Reading.per_second`` counts.
        depths: of the needles, as shares of the context.
        needles: what they are, in a phrase.
        chance: how often a guess finds one.
        copy_chance: how often a guess copies a token.
        targets: tokens that losses are means over.
        asked: needles for each depth and length.
        labels: length → what else it is called.
        findings: the baselines first.
        chosen: the method that was written; None: none, as none gains anything or can be.
        reason: why that one, or none.
        finetune: steps, rate and positions of fine-tuning; empty for none.
        command, created, versions, device, threads, seed, seconds: how to get it again.
    """

    checkpoint: str
    family: str
    parameters: int
    length: int
    factor: float
    lengths: tuple[int, ...]
    metrics: tuple[Metric, ...]
    unit: str
    guide: str
    text: str
    sha256: str
    findings: tuple[Findings, ...]
    sample: str = "stretches of text"
    counted: str = "tokens"
    depths: tuple[float, ...] = ()
    needles: str = ""
    chance: float = 0.0
    copy_chance: float = 0.0
    targets: int = 0
    asked: int = 0
    labels: Mapping[int, str] = field(default_factory=dict)
    chosen: str | None = None
    reason: str = ""
    finetune: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    threads: int = 1
    seed: int = 0
    seconds: float = 0.0

    @property
    def goal(self) -> int:
        """The length that was asked for."""
        return self.lengths[-1]

    @property
    def deciding(self) -> Metric:
        """The metric that methods are ranked by."""
        return self.metrics[0]

    @property
    def causal(self) -> bool:
        """Whether the model predicts the next token."""
        return any(metric.key == "copied" for metric in self.metrics)

    @property
    def tuned(self) -> bool:
        """Whether anything was fine-tuned."""
        return any(each.tuned is not None for each in self.findings)

    def of(self, key: str) -> Findings | None:
        """Results of one method."""
        return next((each for each in self.findings if each.key == key), None)

    def ranked(self, *, tuned: bool = False) -> list[tuple[Findings, Reading]]:
        """All that was measured, the best at the goal first."""
        found = [(each, each.reading(tuned)) for each in self.findings]
        measured = [(each, reading) for each, reading in found if reading is not None]
        sign = 1 if self.deciding.lower else -1
        return sorted(measured, key=lambda pair: sign * pair[1].of(self.deciding)[self.goal])

    def called(self, length: int) -> str:
        """A length in tables: the number, or what else it is called."""
        return self.labels.get(length, str(length))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return to_plain(self)
