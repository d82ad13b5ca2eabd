"""Results of a comparison: tidy records, the same for every task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from posenc.codec import restore, to_plain

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Comparison",
    "Corpus",
    "Measurement",
    "Metric",
    "Provenance",
    "Refusal",
    "Role",
    "Run",
    "Subject",
]

Role = Literal["candidate", "baseline", "control"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity that is measured as a function of something.

    Args:
        key: its name in measurements ("loss", "recall").
        label: its name for people.
        unit: of the value.
        axis: what it is measured against, with the unit.
        lower_is_better: whether a small value is good.
        chance: value reached without any information; None if there is none to speak of.
        description: how it is measured, in a sentence or two.
        headline: whether the comparison is decided by it; exactly one metric is.
        log_x: whether the axis is best drawn on a log scale.
        learned: value at the training length that a subject must reach to count as having learned
            the task at all; None: any that is surely better than chance.
        rule: what ``learned`` stands for, in a phrase ("what the byte before alone tells"); "" for
            the value itself.
        overfit: by how much values at the training length may be better on data it was trained on
            than on what was held out; None: by any amount, if what was held out is learned.
    """

    key: str
    label: str
    unit: str
    axis: str
    lower_is_better: bool
    description: str
    chance: float | None = None
    headline: bool = False
    log_x: bool = False
    learned: float | None = None
    rule: str = ""
    overfit: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether values are shares of something, from 0 to 1, best shown in percent."""
        return self.unit.startswith("share")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that is compared: an encoding, or a trained model looked at in another way.

    Args:
        name: key, as "rope", "t5+sinusoidal" or "rope|window=64".
        label: its name for people.
        role: a candidate, a baseline to beat, or a control that ought to do badly.
        note: why it is there, in a sentence.
    """

    name: str
    label: str
    role: Role
    note: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained model, and what it cost.

    Args:
        subject, seed: which one.
        steps: training steps.
        parameters: trainable numbers.
        tokens_per_second: in training.
        peak_memory_bytes: most memory held while training.
        train_seconds: wall-clock time of training.
    """

    subject: str
    seed: int
    steps: int
    parameters: int
    tokens_per_second: float
    peak_memory_bytes: int
    train_seconds: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A metric's value for one subject and seed at one point of the metric's axis."""

    subject: str
    seed: int
    metric: str
    x: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A measurement that could not be made, and why."""

    subject: str
    metric: str
    x: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data of a comparison.

    Args:
        name: for people.
        files: how many; 0: it is generated.
        train_bytes, held_out_bytes: size of what is trained and tested on, in ``unit``.
        sha256: of all of it, or of what decides the generated data.
        unit: what sizes count ("bytes", "images", "sentences").
    """

    name: str
    sha256: str
    files: int = 0
    train_bytes: int = 0
    held_out_bytes: int = 0
    unit: str = "bytes"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Provenance: everything needed to reproduce the results.

    Args:
        command: the exact command line.
        created: ISO 8601, UTC.
        versions: of python, torch, posenc and the platform.
        device: what it ran on.
        threads: CPU threads a process.
        seeds: all of them.
        corpus: the data.
        settings: everything else that decides results.
    """

    command: str
    created: str
    versions: Mapping[str, str]
    device: str
    threads: int
    seeds: tuple[int, ...]
    corpus: Corpus
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of comparing subjects on a task.

    Args:
        task: its key; title: what was done, for people.
        train_length: tokens a training window.
        test_lengths: where it was tested, ascending.
        metrics, subjects, runs, measurements, refusals: the records.
        provenance: how they came about.
        complete: False when it was interrupted, so that runs are missing.
        expectation: what the literature expects; "" where nothing is said.
        length_unit: what lengths count.
    """

    task: str
    title: str
    train_length: int
    test_lengths: tuple[int, ...]
    metrics: tuple[Metric, ...]
    subjects: tuple[Subject, ...]
    runs: tuple[Run, ...]
    measurements: tuple[Measurement, ...]
    refusals: tuple[Refusal, ...]
    provenance: Provenance
    complete: bool
    expectation: str = ""
    length_unit: str = "tokens"

    @property
    def headline(self) -> Metric:
        """The metric that decides."""
        return next(metric for metric in self.metrics if metric.headline)

    @property
    def most_seeds(self) -> int:
        """Seeds that some subject was trained with, so far."""
        return max(len({r.seed for r in self.runs if r.subject == s.name}) for s in self.subjects)

    def metric(self, key: str) -> Metric | None:
        """The metric called ``key``, if it was measured."""
        return next((metric for metric in self.metrics if metric.key == key), None)

    def values(self, subject: str, metric: str, x: float) -> dict[int, float]:
        """Seed to value of one subject at one point."""
        return {
            m.seed: m.value
            for m in self.measurements
            if (m.subject, m.metric, m.x) == (subject, metric, x)
        }

    def frame(self) -> pd.DataFrame:
        """All measurements, a row each: subject, seed, metric, x, value."""
        import pandas as pd

        columns = [field.name for field in fields(Measurement)]
        return pd.DataFrame(map(attrgetter(*columns), self.measurements), columns=columns)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return to_plain(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Comparison:
        """Read the values that ``to_json`` wrote.

        Raises:
            CheckpointError: when fields are missing or unknown.
        """
        remedy = "It was changed, or written by another version of posenc."
        return restore(
            cls, plain, "comparison", expected="the fields of a comparison", remedy=remedy
        )
