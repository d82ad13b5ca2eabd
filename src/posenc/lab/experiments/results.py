"""Results of a comparison: tidy records, the same for every task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from posenc.lab.codec import restore, to_plain
from posenc.lab.reporting.judge import Metric, Values

Role = Literal["candidate", "baseline", "control"]


@dataclass(frozen=True, kw_only=True)
class ComparedEncoding:
    """An encoding, or a trained model measured with a window.

    Args:
        name: key, as "rope", "t5+sinusoidal" or "rope|window=64".
        label: its name for people.
        role: a candidate, a baseline to beat, or a control that is expected to fail.
        note: its purpose, in a sentence.
    """

    name: str
    label: str
    role: Role
    note: str


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """One trained model, and the cost of its training."""

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
class RefusedMeasurement:
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
        sha256: of all of it, or of what decides generated data.
        files: number of files; 0 for generated data.
        train_bytes, held_out_bytes: sizes in ``unit``.
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
    """Everything needed to reproduce the results.

    Args:
        command: the exact command line.
        created: ISO 8601, UTC.
        versions: of python, torch, posenc and the platform.
        device: its name.
        threads: CPU threads per process.
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
        task, title: its key, and its name for people.
        train_length: tokens of a training window.
        test_lengths: ascending.
        metrics, subjects, runs, measurements, refusals: the records.
        provenance: their origin.
        complete: False if it was interrupted, so that runs are missing.
        expectation: what the literature expects.
        length_unit: what lengths count.
    """

    task: str
    title: str
    train_length: int
    test_lengths: tuple[int, ...]
    metrics: tuple[Metric, ...]
    subjects: tuple[ComparedEncoding, ...]
    runs: tuple[TrainedRun, ...]
    measurements: tuple[Measurement, ...]
    refusals: tuple[RefusedMeasurement, ...]
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

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, float], dict[int, float]]:
        """Seed to value by subject, metric and place."""
        by_place: dict[tuple[str, str, float], dict[int, float]] = {}
        for m in self.measurements:
            by_place.setdefault((m.subject, m.metric, m.x), {})[m.seed] = m.value
        return by_place

    def values(self, subject: str, metric: str, x: float) -> Values:
        """Seed to value of one subject at one point."""
        return self._by_place.get((subject, metric, x), {})

    def by_length(self, subject: str, metric: str) -> dict[int, Values]:
        """``values`` at every length that was to be tested."""
        return {length: self.values(subject, metric, length) for length in self.test_lengths}

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
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
