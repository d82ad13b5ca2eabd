"""Records of the measurements of extended models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from posenc.errors import CheckpointError
from posenc.lab.codec import to_plain
from posenc.lab.reporting.judge import Metric, Values
from posenc.lab.reporting.numbers import Estimate

TIMED = 0.2
"""Largest ``time_error`` of times that are compared."""


@dataclass(frozen=True, kw_only=True)
class StudyReading:
    """Measurements of one model; empty where not applicable.

    Args:
        loss: length → bits per token on the same tokens at every length (masked models: of the
            masked tokens).
        by_position: (position, bits per token) in the longest context, the same tokens at each.
        needles: length → share found at each of ``Study.depths``.
        copied: length → share of a repeated word's tokens that is copied.
        right: size → share of images classified as labelled; length → share of answers right.
        agreement, cosine: size → share of images classified as by the original at its own size, and
            mean cosine of the features with the original's there.
        per_second: tokens (images) per second in a pass over the longest context (largest size).
        peak_memory_bytes: of that pass, beyond the process before it; 0: unknown.
        steps, seconds: of fine-tuning.
        pieces: metric → length → its value for each piece of text, needle, document or image, the
            deciding metric first; of a causal model also ``position``, with places instead.
        tasks: task → length → share of the answers that are right, for each question.
        time_error: half the 95 % interval of the time of a pass, relative to it.
        looks: times at which these measurements decided whether more were made.

    Raises:
        CheckpointError: if the model's output is not finite.
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
    pieces: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    time_error: float = 0.0
    looks: int = 0

    def __post_init__(self) -> None:
        losses = (*self.loss.values(), *(bits for _, bits in self.by_position))
        if not all(map(math.isfinite, (*losses, *self.cosine.values()))):
            raise CheckpointError(
                "the model's output",
                expected="finite numbers",
                got="NaN or infinity",
                remedy="Its weights hold such numbers, or overflow in its dtype; save them again, "
                "or run it in float32.",
            )

    @property
    def windows(self) -> tuple[float, ...]:
        """The deciding metric at the goal for each piece."""
        deciding = next(iter(self.pieces.values()), {0: ()})
        return [*deciding.values()][-1]

    @property
    def values(self) -> Values:
        """``windows`` by the number of the piece."""
        return dict(enumerate(self.windows))

    @property
    def timed(self) -> bool:
        """True if the time is precise enough to be compared."""
        return self.time_error <= TIMED

    @property
    def speed(self) -> str:
        """``per_second`` in tables, marked if imprecise."""
        return f"{'' if self.timed else '≈ '}{self.per_second:,.0f}"

    def found(self, length: int) -> float:
        """Share of needles found at a length, over all depths; 0 where none were asked for."""
        shares = self.needles.get(length, (0.0,))
        return sum(shares) / len(shares)

    def of(self, metric: Metric) -> Mapping[int, float]:
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
class Effective:
    """The effective length of a model; see ``effective_length``.

    Args:
        length: the longest up to which the model is within the margin of its own reference.
        low: the longest up to which it surely is.
        end: the first measured length at which it surely is not; None: there is none.
        margin: share of the reference's value.
        reference: length that the others are held to.
        claimed: the trained length, as it is stated.
        honest: no shorter context has surely far less loss.
        limited_by: ability that first leaves the margin; "": none does.
        abilities: that count.
        unlearned: that do not: at chance at the reference, or not measured at every length.
        ceiling: all that was asked for was found at every length.
        cut: input length beyond which texts are cut; None: they are not.
    """

    length: int
    low: int
    end: int | None
    margin: float
    reference: int
    claimed: int
    honest: bool
    limited_by: str = ""
    abilities: tuple[str, ...] = ()
    unlearned: tuple[str, ...] = ()
    ceiling: bool = False
    cut: int | None = None

    def settled(self, lengths: Sequence[int]) -> bool:
        """True if no measured length lies between those that surely hold and surely do not."""
        beyond = [length for length in lengths if length > self.low]
        return not beyond or self.end == beyond[0]


@dataclass(frozen=True, kw_only=True)
class Rise:
    """Position before the stated length from which on the loss of the same tokens is higher.

    Args:
        position: the first of these.
        before, after: the least mean loss at a place before it, and the mean from it on.
    """

    position: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class KeyTokens:
    """Loss on the tokens that a long context helps to predict; see ``measure_key_tokens``.

    Args:
        short: tokens of the short context.
        reference: length of the long context by which they were chosen.
        count: number of key tokens, of ``tokens``.
        tokens: that were looked at.
        loss: length → bits per key token; empty if there is none.
        every: length → bits per token of all that were looked at.
        segments: runs of tokens with key ones, over which the interval of ``loss`` is.
        loss_error, every_error: length → half the 95 % interval of ``loss`` and ``every``; empty
            for less than two segments.
    """

    short: int
    reference: int
    count: int
    tokens: int
    loss: Mapping[int, float]
    every: Mapping[int, float]
    segments: int
    loss_error: Mapping[int, float]
    every_error: Mapping[int, float]

    def estimates(self) -> dict[int, Estimate]:
        """Length → bits per key token with their interval."""
        return {
            n: Estimate(bits, self.loss_error.get(n), self.segments)
            for n, bits in self.loss.items()
        }


@dataclass(frozen=True, kw_only=True)
class Study:
    """Measurements of a checkpoint, as it is or extended by several methods.

    Args:
        checkpoint: name of its folder.
        family: ``model_type``.
        parameters: number of parameters; 0: unknown.
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
        effective: the length that a model measured as it is reads; None: unknown.
        rise: where its loss rises before the stated length; None: nowhere, or unknown.
        key_tokens: its loss on tokens that need a long context; None: not measured.
        style: of the questions of tasks: ``base``, ``chat``, or ``written`` where a server gives no
            log-probabilities of a prompt; "" without questions.
        left_out: length or task → why it was not measured.
        targets: number of tokens in each loss.
        asked: needles per depth and length.
        unread: contexts of the text that there was no time for.
        labels: length → its name, where that is not the number.
        chosen, reason: the method written, and why; None: none was.
        finetune: settings of the fine-tuning.
        command, created, versions, device, threads, seed, seconds: provenance; threads 0: unknown.
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
    trivial: float | None = None
    trivial_rule: str = ""
    gate: str = ""
    effective: Effective | None = None
    rise: Rise | None = None
    key_tokens: KeyTokens | None = None
    style: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    targets: int = 0
    asked: int = 0
    unread: int = 0
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
    def deciding(self) -> Metric:
        """The metric that ranks methods."""
        return self.metrics[0]

    @property
    def causal(self) -> bool:
        """True for a model of the next token."""
        return [metric.key for metric in self.metrics[:2]] == ["loss", "needles"]

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

    @property
    def alone(self) -> tuple[Findings, StudyReading]:
        """The model of a study of one, as it is; a control may stand beside it."""
        first = self.findings[0]
        assert first.untuned is not None  # all that was measured
        return first, first.untuned

    @property
    def answers(self) -> dict[str, dict[int, float]]:
        """Task → length → share of right answers, of a model measured as it is."""
        tasks = self.findings[0].untuned.tasks if self.findings[0].untuned else {}
        return {name: {n: fmean(s) for n, s in values.items()} for name, values in tasks.items()}

    @property
    def asked_at(self) -> tuple[int, ...]:
        """Lengths of questions."""
        return tuple(sorted({length for shares in self.answers.values() for length in shares}))

    def ranked(self, *, tuned: bool = False) -> list[tuple[Findings, StudyReading]]:
        """All measured models, the best at the goal first."""
        readings = [(method, method.reading(tuned)) for method in self.findings]
        measured = [(method, reading) for method, reading in readings if reading is not None]
        metric = self.deciding
        return sorted(measured, key=lambda pair: metric.sign * pair[1].of(metric)[self.goal])

    def readings(self, *, tuned: bool = False) -> dict[str, StudyReading]:
        """Readings by method, in the order of ``ranked``."""
        return {method.key: reading for method, reading in self.ranked(tuned=tuned)}

    def called(self, length: int) -> str:
        """The name of a length in tables."""
        return self.labels.get(length, str(length))

    def at(self, length: int) -> str:
        """A length with its unit."""
        side = " a side" if self.unit == "pixel" and length not in self.labels else ""
        return f"{self.called(length)} {self.unit}s{side}"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values; of metrics what is shown of them."""
        metrics = [
            {
                "key": metric.key,
                "name": metric.noun,
                "axis": metric.unit,
                "title": metric.label,
                "guide": metric.description,
                "lower": metric.lower_is_better,
                "percent": metric.is_share,
                "brief": metric.brief,
            }
            for metric in self.metrics
        ]
        return to_plain(self) | {"metrics": metrics}
