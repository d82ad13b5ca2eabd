"""Interface of tasks, and how to add one.

A task is one file in ``posenc.experiments.tasks`` that ends in an ``ENTRY``, known by the file's
name, or an entry that ``posenc.register`` was given; ``posenc compare --task NAME`` and ``posenc
tasks`` then know it. The lab trains, resumes, measures, counts and reports; the file holds four
things and no loop:

1. **A model for an encoding**: ``build(encoding)``. The encoding comes as the user wrote it;
   ``Recipe.parse`` (``posenc.experiments.recipe``) reads options and drawn positions. Draw all
   weights from torch's global generator, which the lab has seeded, and raise ArgumentError for an
   encoding that cannot serve. ``build("nope")`` must work: the weights that other models share
   with it by name and shape are copied from it, so that encodings differ in nothing else.
2. **A seeded batch**: ``batch(seed, step)``, named tensors, a pure function of its arguments (use
   ``generator(seed, step)`` from here), the same for all encodings. There is no other state, which
   is why a run that was killed goes on to the same bits.
3. **A loss**: ``loss(model, batch)``, a scalar.
4. **Measurements**: ``count(encoding)`` and ``measure(...)``. A task whose measurements are some
   numbers at some points says so in a list of ``Probe`` and returns ``probed(...)``, which turns
   positions that an encoding does not have into refusals with the reason.
   The headline metric says from which value on the task counts as learned (``Metric.learned``,
   ``Metric.chance``); where the data to train on is finite, it is also measured on that, as the
   metric ``seen(headline)`` makes, so that an overfitted model is told.

Beside them it describes itself (``title``, ``data``, ``corpus``, ``metrics``, ``subjects``,
``lengths``), names what decides training (``fingerprint``), says what it costs
(``tokens_per_step``, ``require_memory``) and how its model is written (``save``). Tasks whose
points are no sequence lengths (sizes of images, shares of missing hours) take ``train_length`` and
``test_lengths`` for those points and say so in ``TaskEntry.length_unit``; one that has a single
point returns it alone from ``Defaults.test_lengths``. A package that only this task needs is
imported where it is used, not at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from posenc.errors import LengthError
from posenc.experiments.recipe import Variant
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal, Subject
from posenc.training.seeding import fingerprint, generator
from posenc.training.task import TrainingTask

__all__ = [
    "Defaults",
    "Probe",
    "Task",
    "TaskEntry",
    "TaskSettings",
    "fingerprint",
    "generator",
    "probed",
    "seen",
    "times",
]


class TaskSettings(Protocol):
    """The settings of a comparison that a task is made from; see ``Settings``."""

    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def text(self) -> Path | None: ...
    @property
    def train_length(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def references(self) -> Sequence[str]: ...
    @property
    def variants(self) -> tuple[Variant, ...]: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def batch(self) -> int: ...


class Task(TrainingTask, Protocol):
    """A job that tells encodings apart: trained, then measured.

    A task is made from its settings in every worker process; all it draws at random it draws from
    generators seeded by its arguments, so that every worker and every encoding sees the same.
    """

    title: str
    """Title of the report."""

    data: str
    """Description of the data, in a phrase."""

    corpus: Corpus
    """The same for the record, with its hash."""

    metrics: tuple[Metric, ...]
    """Metrics, one of which is the headline. ``"training_loss"`` is measured by the lab."""

    subjects: tuple[Subject, ...]
    """Subjects of the comparison, each with the reason why it is there."""

    lengths: tuple[int, ...]
    """Test lengths, ascending; the first is the training length."""

    training_unit: float
    """Factor from the training loss to the unit of ``"training_loss"``."""

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse to train what does not fit.

        Raises:
            ArgumentError: when a training step is estimated to take more than ``available`` bytes.
        """

    def count(self, encoding: str) -> int:
        """Number of times that ``measure`` yields."""

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """Measure a trained model, and its variants, bit by bit.

        Args:
            model: as ``build`` made it, trained.
            encoding, seed: which run it is.
            available: bytes of memory there are; what needs more is refused before it is tried.
        """

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model, so that others can load it without the lab."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Settings that suit a task: about a minute an encoding (three seeds) on two cores.

    Args:
        encodings: what is compared.
        references: subjects to judge them by, the controls that must fail among them.
        train_length: the length (or other point) that is trained at.
        test_lengths: from it, all that is tested at.
        steps, width, layers, heads, batch, learning_rate: as in ``Settings``.
    """

    encodings: tuple[str, ...]
    references: tuple[str, ...]
    train_length: int
    test_lengths: Callable[[int], Sequence[int]]
    steps: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 32
    learning_rate: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """A task as the lab lists it, without making it.

    Args:
        make: the task, from settings.
        summary: what is done, in a phrase.
        data: on what, and where it comes from.
        metric: what is measured, the deciding one first.
        expectation: what the literature expects, with its sources, and which controls must fail.
        defaults: see there.
        sample: settings of the smallest comparison, for tests.
        options: the task's own options with their defaults; a value given must be of the same
            type.
        axes: position axes of its data: 1 for sequences, 2 for images.
        length_unit: what lengths count ("tokens", "symbols", "pixels a side").
        reads_text: whether ``Settings.text`` means something to it.
        windows: whether it can look at a trained model through a window (``rope|window``).
    """

    make: Callable[[TaskSettings], Task]
    summary: str
    data: str
    metric: str
    expectation: str
    defaults: Defaults
    sample: Mapping[str, Any] = field(
        default_factory=lambda: {"train_length": 8, "test_lengths": (12,)}
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: int = 1
    length_unit: str = "tokens"
    reads_text: bool = False
    windows: bool = False

    def parameters(self) -> dict[str, Parameter]:
        """The task's options as parameters, of the types of their defaults."""
        return {
            name: Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=type(value))
            for name, value in self.options.items()
        }


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measurement: the values of some metrics at one point of their axis.

    Args:
        metrics: keys of the metrics.
        x: the point.
        run: the values, from the trained model; LengthError where the encoding has no position.
        needs: bytes of memory that it takes, from the model.
    """

    metrics: tuple[str, ...]
    x: float
    run: Callable[[nn.Module], Sequence[float]]
    needs: Callable[[nn.Module], int] = lambda model: 0


def probed(
    probes: Sequence[Probe], model: nn.Module, *, subject: str, seed: int, available: int | None
) -> Iterator[list[Measurement | Refusal]]:
    """Run probes: an item for each, as ``Task.measure`` yields them.

    Args:
        probes: what is measured.
        model: trained.
        subject, seed: which run it is.
        available: bytes of memory there are.
    """
    for probe in probes:
        needed = probe.needs(model)
        try:
            if available is not None and needed > available:
                reason = (
                    f"it would take about {needed / 1e9:.1f} GB of memory, of which "
                    f"{available / 1e9:.1f} GB are free"
                )
            else:
                values = probe.run(model)
                yield [
                    Measurement(subject=subject, seed=seed, metric=metric, x=probe.x, value=value)
                    for metric, value in zip(probe.metrics, values, strict=True)
                ]
                continue
        except LengthError as error:
            reason = f"it needs positions outside {error.expected}"
        yield [
            Refusal(subject=subject, metric=metric, x=probe.x, reason=reason)
            for metric in probe.metrics
        ]


def seen(metric: Metric) -> Metric:
    """The metric called "seen": a headline metric on data that was trained on.

    Measured at the training length alone, it tells an overfitted model.
    """
    return replace(
        metric,
        key="seen",
        label=f"{metric.label}: the same of data trained on",
        description="At the training length alone, to tell what was learned by heart.",
        chance=None,
        headline=False,
        learned=None,
        rule="",
        overfit=None,
    )


def times(*factors: float) -> Callable[[int], tuple[int, ...]]:
    """``Defaults.test_lengths`` as multiples of the training length."""
    return lambda length: tuple(round(factor * length) for factor in factors)
