"""Interface of tasks, and how to add one.

A task is one file in ``posenc.lab.experiments.tasks`` that ends in an ``ENTRY``, named as the file,
or an entry given to ``posenc.register``; ``posenc compare --task NAME`` and ``posenc tasks`` then
list it. Training, resuming, measuring and reporting are shared; the file holds a subclass of
``Task``:

1. ``make_model(recipe)``: a model of an encoding with its options, and of the ``positions`` that
   the class lists. Draw all weights from torch's global generator, and raise ArgumentError for an
   encoding that the task does not support. ``build("nope")`` must work:
   weights that other models share with it by name and shape are copied from it, so that encodings
   differ in nothing else.
2. ``batch(seed, step)``: named tensors, a pure function of its arguments (use ``generator(seed,
   step)``), the same for all encodings. A killed run therefore resumes to the same bits.
3. ``loss(model, batch)``: a scalar.
4. ``probes``: the measurements, each at one point of its axis. Where the data to train on is
   finite, the headline metric is also measured on that, as ``seen(headline)``, to detect
   overfitting.
5. ``stack_config``, ``vocabulary``, ``attentions`` or ``bytes_needed``: an estimate of memory.

Points that are no sequence lengths (sizes of images, for example) are still called
``train_length`` and ``test_lengths``; ``TaskEntry.length_unit`` says what they count. A package
that only this task needs is imported where it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from posenc.arguments import Count
from posenc.errors import ArgumentError, LengthError
from posenc.lab.experiments import OF_TASK, ComparisonOptions
from posenc.lab.experiments.recipe import (
    Positions,
    Recipe,
    Variant,
    describe,
    fit_note,
    fitted_options,
)
from posenc.lab.experiments.results import Corpus, Measurement, RefusedMeasurement
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.machine import gigabytes, stack_bytes
from posenc.lab.training.seeding import fingerprint
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import StackConfig


@dataclass(frozen=True, kw_only=True)
class TaskSettings(ComparisonOptions, ABC):
    """The settings of a comparison that a task is made from; see ``ComparisonSettings``."""

    out: Path
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    options: Mapping[str, Any] = field(default_factory=dict)
    references: Sequence[str] = OF_TASK
    threads: Count = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to test at, ascending; the first is the training length."""
        assert isinstance(self.test_lengths, tuple)  # ComparisonSettings makes it one
        return self.test_lengths

    @property
    @abstractmethod
    def variants(self) -> tuple[Variant, ...]:
        """All that is measured: the encodings, then the references not among them."""


class Task(ABC):
    """A task that models with different encodings are trained and measured on.

    Every worker process makes the task from its settings; random draws come from generators seeded
    by their arguments, so that every worker and every encoding sees the same.

    Args:
        settings: of the comparison.
        title: title of the report.
        corpus: the data.
        metrics: one of them the headline; ``"training_loss"`` is measured by the training loop.
        decisive, also_decisive: everything that decides a training step besides encoding, seed,
            step and shape of the model; hashed before and after that shape.
        example_length: tokens of a training example.
        fitted_length: positions of a training example, which tables and buckets are fitted to;
            ``example_length`` by default.

    Attributes:
        data: the data, in a phrase; the corpus's name by default.
        subjects: subjects of the comparison, each with the reason why it is there.
        lengths: test lengths, ascending; the first is the training length.
        tokens_per_step: tokens of a batch.
        vocabulary: logits per position, for the estimate of memory.
        attentions: attention layers per layer of the settings, likewise.
        axes: position axes of the data.
        positions: kinds of positions that a recipe may ask for.
        training_unit: factor from the training loss to the unit of ``"training_loss"``.
        probes: the measurements.
        lacking: reason why a length has no probe, where the data has too few examples of it.
    """

    axes: int = 1
    positions: tuple[Positions, ...] = ("plain",)
    training_unit: float = 1.0
    vocabulary: int = 0
    attentions: int = 1

    def __init__(
        self,
        settings: TaskSettings,
        *,
        title: str,
        corpus: Corpus,
        metrics: Sequence[Metric],
        decisive: Sequence[object],
        also_decisive: Sequence[object] = (),
        example_length: int,
        fitted_length: int | None = None,
    ) -> None:
        self.settings = settings
        self.title, self.corpus, self.data = title, corpus, corpus.name
        self.metrics = tuple(metrics)
        shape = settings.width, settings.layers, settings.heads, settings.batch
        self.fingerprint = fingerprint(*decisive, *shape, *also_decisive)
        self.lengths = settings.lengths
        self.example_length = example_length
        self.fitted_length = example_length if fitted_length is None else fitted_length
        self.tokens_per_step = settings.batch * example_length
        self.subjects = tuple(
            describe(
                v, references=settings.references, note=fit_note(v.encoding, self.fitted_length)
            )
            for v in settings.variants
        )
        self.probes: list[Probe] = []
        self.lacking: dict[int, str] = {}

    def recipe_of(self, encoding: str) -> Recipe:
        """The recipe that a name stands for.

        Raises:
            UnknownNameError, ArgumentError: as ``Recipe.parse``; for positions of another kind.
        """
        recipe = Recipe.parse(encoding, axes=self.axes)
        if recipe.positions not in self.positions:
            raise ArgumentError(
                "encoding",
                expected=f"{' or '.join(self.positions)} positions",
                got=encoding,
                remedy="See posenc tasks for those that draw positions: copy, for example.",
            )
        return recipe

    def build(self, encoding: str) -> nn.Module:
        """A new model by the name of its encoding; see ``recipe_of`` and ``make_model``."""
        return self.make_model(self.recipe_of(encoding))

    @abstractmethod
    def make_model(self, recipe: Recipe) -> nn.Module:
        """A new model, its weights drawn from torch's global generator.

        Raises:
            ArgumentError: if the task does not support the encoding.
        """

    @abstractmethod
    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """Tensors of a training step."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The scalar to minimise."""

    def stack_config(self, model: nn.Module) -> StackConfig:
        """Shape of the model's blocks, for the estimate of memory."""
        return cast(StackConfig, self.saved_model(model).config)

    def bytes_needed(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        """Estimated memory of a forward pass or a training step, with all attention weights."""
        return stack_bytes(
            model,
            self.stack_config(model),
            layers=self.attentions * self.settings.layers,
            vocabulary=self.vocabulary,
            rows=rows,
            length=length,
            training=training,
        )

    def add_probe(
        self,
        metrics: tuple[str, ...],
        x: int,
        run: Callable[[nn.Module], Sequence[float]],
        *,
        rows: int = 0,
        length: int | None = None,
    ) -> None:
        """Add a probe at ``x`` that evaluates ``rows`` examples of ``length`` (``x``) at a time."""
        length = x if length is None else length
        needs = partial(self.bytes_needed, rows=rows, length=length, training=False)
        self.probes.append(Probe(metrics=metrics, x=x, run=run, needs=needs))

    def saved_model(self, model: nn.Module) -> SavedModel[Any]:
        """The part to be saved of what ``build`` returns: all of it, by default."""
        return cast(SavedModel[Any], model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model; the ``load`` of its class reads it."""
        self.saved_model(model).save(folder)

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that does not fit.

        Raises:
            ArgumentError: if a step is estimated to take more than ``available`` bytes.
        """
        rows, length = self.settings.batch, self.example_length
        needed = self.bytes_needed(model, rows, length, training=True)
        if needed > available:
            raise ArgumentError(
                "batch",
                expected=f"a training step that fits into {gigabytes(available)}",
                got=f"about {gigabytes(needed)} for {rows} windows of {length}",
                remedy="Lower batch, train_length or width, or use fewer workers.",
            )

    def count(self, encoding: str) -> int:
        """Number of items that ``measure`` yields."""
        return len(self.probes) + bool(self.lacking)

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | RefusedMeasurement]]:
        """Measure a trained model, and its variants, step by step.

        Args:
            model: as ``build`` made it, trained.
            encoding, seed: which run it is.
            available: free memory in bytes; measurements that need more are refused untried.
        """
        for probe in self.probes:
            yield probe.measure(model, subject=encoding, seed=seed, available=available)
        if self.lacking:
            yield [
                RefusedMeasurement(subject=encoding, metric=metric, x=length, reason=reason)
                for length, reason in self.lacking.items()
                for metric in self.probes[0].metrics
            ]

    def model_arguments(self, recipe: Recipe) -> dict[str, Any]:
        """Width, layers, heads and encoding, as configs of models take them."""
        return {
            "dim": self.settings.width,
            "layers": self.settings.layers,
            "heads": self.settings.heads,
            "encoding": recipe.encoding,
            "options": fitted_options(recipe, self.fitted_length),
            "max_length": self.fitted_length,
        }


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Settings that suit a task: about a minute an encoding (three seeds) on two cores.

    Args:
        encodings: the candidates.
        references: baselines and controls, those that must fail among them.
        train_length: the length (or other point) of training.
        test_lengths: all test lengths, from the training length.
        steps, width, layers, heads, batch, learning_rate: as in ``ComparisonSettings``.
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
    """A task as it is listed, without making it.

    Args:
        make: the task, from settings.
        summary: the job, in a phrase.
        data: the data and its source.
        metric: the metrics, the deciding one first.
        expectation: what the literature expects, with its sources, and which controls must fail.
        defaults: see there.
        sample: settings of the smallest comparison, for tests.
        options: the task's own options with their defaults, which also give their types.
        axes: position axes of its data: 1 for sequences, 2 for images.
        length_unit: what lengths count ("tokens", "symbols", "pixels a side").
        reads_text: True if it uses ``ComparisonSettings.text``.
        windows: True if a trained model can be measured with a window (``rope|window``).
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


def training_loss(unit: str, more: str = ".") -> Metric:
    """The metric of training curves.

    Args:
        unit: of the loss.
        more: the end of its description.
    """
    return Metric(
        key="training_loss",
        label="Training loss",
        unit=unit,
        axis="training step",
        lower_is_better=True,
        description=f"Mean over the steps since the point before{more}",
    )


def seen(metric: Metric, *, trivial: float | None = None, learned: float | None = None) -> Metric:
    """The metric ``"seen"``: the headline on training data, to detect overfitting.

    Args:
        metric: the headline.
        trivial, learned: what the same predictors reach on training data; by default as held out.
    """
    return replace(
        metric,
        key="seen",
        label=f"{metric.label}: the same of data trained on",
        description="At the training length alone, to tell what was learned by heart.",
        trivial=metric.trivial if trivial is None else trivial,
        headline=False,
        learned=metric.learned if learned is None else learned,
        overfit=None,
    )


def times(*factors: float) -> Callable[[int], tuple[int, ...]]:
    """``Defaults.test_lengths`` as multiples of the training length."""
    return lambda length: tuple(round(factor * length) for factor in factors)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measurement: the values of some metrics at one point of their axis.

    Args:
        metrics: keys of the metrics.
        x: the point.
        run: the values, from the trained model; ArgumentError if it cannot take the input.
        needs: bytes of memory, from the model.
    """

    metrics: tuple[str, ...]
    x: float
    run: Callable[[nn.Module], Sequence[float]]
    needs: Callable[[nn.Module], int]

    def attempt(self, model: nn.Module, available: int | None) -> Sequence[float] | str:
        """The values, or the reason why the model cannot be measured."""
        needed = self.needs(model)
        if available is not None and needed > available:
            return (
                f"it would take about {gigabytes(needed)} of memory, of which "
                f"{gigabytes(available)} are free"
            )
        try:
            return self.run(model)
        except LengthError as error:
            return f"it needs positions outside {error.expected}"
        except ArgumentError as error:
            return f"it needs {error.expected}"

    def measure(
        self, model: nn.Module, *, subject: str, seed: int, available: int | None
    ) -> list[Measurement | RefusedMeasurement]:
        """Measurements of a subject, or refusals with the reason."""
        values = self.attempt(model, available)
        if isinstance(values, str):
            return [
                RefusedMeasurement(subject=subject, metric=metric, x=self.x, reason=values)
                for metric in self.metrics
            ]
        return [
            Measurement(subject=subject, seed=seed, metric=metric, x=self.x, value=value)
            for metric, value in zip(self.metrics, values, strict=True)
        ]
