"""Records of the measurements of extended models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posenc.codec import to_plain
from posenc.reporting.intervals import Bounds, Estimate

TIMED = 0.2
"""Largest ``time_error`` of times that are compared."""


@dataclass(frozen=True, kw_only=True)
class StudyMetric:
    """A quantity measured at every length, with its wording.

    Args:
        key: its field in ``StudyReading``.
        name: in tables and sentences.
        axis: label of the chart's axis, with the unit.
        title, guide: of its chart; no chart without a title.
        does: a clause around the value ``{}``: "it finds {} of the needles".
        worse: a clause around a difference ``{}``: "costs {} bits more".
        lower: lower values are better.
        percent: values are shares, shown in per cent.
        brief: tables show the first and the last length only.
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
        """The value in tables."""
        return f"{value:.0%}" if self.percent else f"{value:.3f}"

    def clause(self, value: float) -> str:
        """The value in a sentence."""
        return self.does.format(self.shown(value))

    def difference(self, deficit: Estimate) -> str:
        """The deficit of a worse model in a sentence, with its interval."""
        if not self.percent:
            return self.worse.format(deficit.shown(".3f"))
        return self.worse.format(
            replace(deficit, bounds=Bounds(-1.0, 1.0)).scaled(100).shown(".1f")
        )


@dataclass(frozen=True, kw_only=True)
class StudyReading:
    """Measurements of one model; empty where not applicable.

    Args:
        loss: length → bits per token on the same tokens at every length (masked models: of the
            masked tokens).
        by_position: (position, bits per token) in the longest context, the same tokens at each.
        needles: length → share found at each of ``Study.depths``.
        copied: length → share of a repeated word's tokens that is copied.
        right: size → share of images classified as labelled.
        agreement, cosine: size → share of images classified as by the original at its own size, and
            mean cosine of the features with the original's there.
        per_second: tokens (images) per second in a pass over the longest context (largest size).
        peak_memory_bytes: of that pass, beyond the process before it.
        steps, seconds: of fine-tuning.
        windows: the deciding metric at the goal for each piece of text, document or image.
        time_error: half the 95 % interval of the time of a pass, relative to it.
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

    @property
    def timed(self) -> bool:
        """True if the time is precise enough to be compared."""
        return self.time_error <= TIMED

    @property
    def speed(self) -> str:
        """``per_second`` in tables, marked if imprecise."""
        return f"{'' if self.timed else '≈ '}{self.per_second:,.0f}"

    def found(self, length: int) -> float:
        """Share of needles found at a length, over all depths."""
        shares = self.needles[length]
        return sum(shares) / len(shares)

    def of(self, metric: StudyMetric) -> Mapping[int, float]:
        """Values of a metric by length."""
        if metric.key == "needles":
            return {length: self.found(length) for length in self.needles}
        values: Mapping[int, float] = getattr(self, metric.key)
        return values


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """Claims of a method; see ``Extension`` and ``ExtensionClaims``."""

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
        key: the method as written, or the name of a baseline.
        role: ``"method"`` or ``"baseline"``.
        claims: of its parts.
        advice: notes on its use at this length.
        refusal: why it was not measured.
        writable: a checkpoint can hold it.
        served: the ``rope_type`` that transformers runs it as; empty: posenc only.
        untuned, tuned: before and after fine-tuning, if measured.
        failed: why it was not fine-tuned.
    """

    key: str
    role: str
    claims: tuple[Claimed, ...] = ()
    advice: tuple[str, ...] = ()
    refusal: str = ""
    writable: bool = False
    served: str = ""
    untuned: StudyReading | None = None
    tuned: StudyReading | None = None
    failed: str = ""

    def reading(self, tuned: bool) -> StudyReading | None:
        """The measurements after fine-tuning or before."""
        return self.tuned if tuned else self.untuned


@dataclass(frozen=True, kw_only=True)
class Study:
    """Measurements of a checkpoint, as it is or extended by several methods.

    Args:
        checkpoint: name of its folder.
        family: ``model_type``.
        parameters: number of parameters.
        length: the trained length.
        factor: 1 if nothing was extended.
        lengths: of the contexts, the requested one last; of images the longer side in pixels.
        metrics: the deciding one first.
        unit: of lengths: ``"byte"``, ``"token"`` or ``"pixel"``.
        guide: to the table.
        text, sha256: description and digest of the data.
        findings: the baselines first.
        sample: name of the pieces in ``StudyReading.windows``, in the plural.
        counted: name of the items in ``StudyReading.per_second``.
        depths: of the needles, as shares of the context.
        needles: their description.
        chance, copy_chance: probability of a correct guess of a needle, and of a copied token.
        trivial: value of the deciding metric that a predictor reaches which sees no input; None:
            unknown.
        trivial_rule: that predictor, in a phrase ("byte frequencies").
        gate: reason why nothing is concluded; "" if something is.
        targets: number of tokens in each loss.
        asked: needles per depth and length.
        labels: length → its name, where that is not the number.
        chosen, reason: the method written, and why; None: none was.
        finetune: settings of the fine-tuning.
        command, created, versions, device, threads, seed, seconds: provenance.
    """

    checkpoint: str
    family: str
    parameters: int
    length: int
    factor: float
    lengths: tuple[int, ...]
    metrics: tuple[StudyMetric, ...]
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
    trivial: float | None = None
    trivial_rule: str = ""
    gate: str = ""
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
        """The requested length."""
        return self.lengths[-1]

    @property
    def base_length(self) -> int:
        """The trained length; the shortest one if that was not measured."""
        return self.length if self.length in self.lengths else self.lengths[0]

    @property
    def deciding(self) -> StudyMetric:
        """The metric that ranks methods."""
        return self.metrics[0]

    @property
    def causal(self) -> bool:
        """True for a model of the next token."""
        return any(metric.key == "copied" for metric in self.metrics)

    @property
    def tuned(self) -> bool:
        """True if any model was fine-tuned."""
        return any(method.tuned is not None for method in self.findings)

    @property
    def whens(self) -> tuple[bool, ...]:
        """After fine-tuning or not, for each set of readings, the deciding ones first."""
        return (True, False) if self.tuned else (False,)

    def of(self, key: str) -> Findings | None:
        """Results of one method."""
        return next((method for method in self.findings if method.key == key), None)

    def ranked(self, *, tuned: bool = False) -> list[tuple[Findings, StudyReading]]:
        """All measured models, the best at the goal first."""
        readings = [(method, method.reading(tuned)) for method in self.findings]
        measured = [(method, reading) for method, reading in readings if reading is not None]
        sign = 1 if self.deciding.lower else -1
        return sorted(measured, key=lambda pair: sign * pair[1].of(self.deciding)[self.goal])

    def called(self, length: int) -> str:
        """The name of a length in tables."""
        return self.labels.get(length, str(length))

    def at(self, length: int) -> str:
        """A length with its unit."""
        side = " a side" if self.unit == "pixel" and length not in self.labels else ""
        return f"{self.called(length)} {self.unit}s{side}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return to_plain(self)
