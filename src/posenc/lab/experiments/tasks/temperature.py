"""Temperatures at irregular hours: positions that are real times."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.lab.experiments.recipe import Recipe
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    seen,
    times,
    training_loss,
)
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.seeding import generator
from posenc.layout import Layout
from posenc.models.block import make_norm, normalize
from posenc.models.checkpoint import SavedModel
from posenc.models.stack import LayersConfig, make_blocks, make_encodings, share_encodings


class Interpolator(SavedModel[LayersConfig]):
    """Encoder of numbers at real times, which predicts a value for each, hidden or not.

    Args:
        config: of its blocks; the encoding is of the positions, which are times.
    """

    kind, made_from = "interpolator", LayersConfig

    def __init__(self, config: LayersConfig) -> None:
        super().__init__(config)
        encodings = make_encodings(
            config, config.encoding, config.options, layers=config.layers, causal=False
        )
        self.input = nn.Linear(2, config.dim)
        self.blocks = make_blocks(config, encodings, causal=False)
        self.shared_encodings = share_encodings(self)
        self.norm = make_norm(config.norm, config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, 1)
        self.blocks.reset_parameters()

    def forward(
        self, values: Float[Tensor, "B L"], hidden: Bool[Tensor, "B L"], layout: Layout
    ) -> Float[Tensor, "B L"]:
        """A value ``[B, L]`` for each reading; hidden ``values`` are ignored."""
        visible = torch.stack([values.masked_fill(hidden, 0.0), hidden.to(values.dtype)], dim=-1)
        x = self.blocks(self.blocks.embed(self.input(visible), layout), layout)
        predicted: Tensor = self.output(normalize(self.norm, x, layout)).squeeze(-1)
        return predicted


class Timed(nn.Module):
    """An ``Interpolator`` with readings at their times, or at their indices.

    Args:
        model: the interpolator.
        by_index: positions are 0, 1, 2, … whatever the times.
    """

    def __init__(self, model: Interpolator, *, by_index: bool) -> None:
        super().__init__()
        self.model, self.by_index = model, by_index

    def forward(self, values: Tensor, times: Tensor, hidden: Tensor) -> Tensor:
        """A value for each reading, from values, hours and the mask of hidden ones, ``[B, L]``."""
        if self.by_index:
            layout = Layout.sequence(values.shape[1], device=values.device)
        else:
            layout = Layout.at(times)
        predicted: Tensor = self.model(values, hidden, layout)
        return predicted


HOURS = 3
"""Hours of a span for each reading in it: 32 readings of 96 hours."""

HIDDEN = 0.25
"""Share of the readings that are hidden and predicted."""

PART, EVERY = 480, 4
"""The year is cut into parts of so many hours; each fourth is held out."""

SPANS, ROWS = 512, 64
"""Spans tested at a length, and at a time."""


class Temperatures(Task):
    """Predict hidden readings of an irregularly sampled series from those around them.

    Positions are hours since the span began. A recipe that ends in ``@index`` counts readings
    instead (0, 1, 2, …), as if they were evenly spaced: the same method without times.

    Args:
        settings: of the comparison; lengths count readings.

    Raises:
        DataError: if the longest span is longer than a held-out part of the year.
    """

    positions = ("plain", "index")

    def __init__(self, settings: TaskSettings) -> None:
        place, length = settings.options["place"], settings.train_length
        series, dates = _readings(place)
        if HOURS * settings.lengths[-1] > PART:
            raise DataError(
                "test_lengths",
                expected=f"at most {PART // HOURS} readings",
                got=settings.lengths[-1],
                remedy=f"Held-out parts have {PART} hours.",
            )
        parts = series[: len(series) // PART * PART].view(-1, PART)
        in_training = torch.arange(len(parts)) % EVERY != EVERY - 1
        self._deviation = parts[in_training].std()
        normal = (parts - parts[in_training].mean()) / self._deviation
        self._train, self._held_out = normal[in_training], normal[~in_training]
        self._variance = float(self._held_out.var())
        digest = hashlib.sha256(series.numpy().tobytes()).hexdigest()
        super().__init__(
            settings,
            title="Hidden temperatures at irregular hours, told from those around them",
            corpus=Corpus(
                name=f"a year of hourly temperatures in {place} ({dates}), "
                f"{length} random hours of {HOURS * length}",
                sha256=digest,
                files=1,
                train_bytes=self._train.numel(),
                held_out_bytes=self._held_out.numel(),
                unit="hours",
            ),
            metrics=_metrics(),
            decisive=(digest, length),
            example_length=length,
            fitted_length=HOURS * length,
        )
        for size in self.lengths:
            run = partial(self._score, parts=self._held_out, length=size)
            self.add_probe(("error", "degrees"), size, run, rows=ROWS)
        self.add_probe(("seen",), length, lambda model: self._score(model, self._train, length)[:1])

    def make_model(self, recipe: Recipe) -> Timed:
        """An ``Interpolator``; a learned table has the hours of a span."""
        config = LayersConfig(
            activation="gelu", norm="layer", bias=True, **self.model_arguments(recipe)
        )
        return Timed(Interpolator(config), by_index=recipe.positions == "index")

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``values``, ``times`` and ``hidden``, all ``[batch, train_length]``."""
        rows, length = self.settings.batch, self.settings.train_length
        return _spans(self._train, rows, length, generator(seed, step))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error of hidden readings, in variances of the training data."""
        return _squares(model, batch).mean()

    def saved_model(self, model: nn.Module) -> Interpolator:
        """The interpolator."""
        return cast(Timed, model).model

    @torch.inference_mode()
    def _score(self, model: nn.Module, parts: Tensor, length: int) -> tuple[float, float]:
        device = next(model.parameters()).device
        spans = _spans(parts, SPANS, length, generator(length))
        squares = []
        for begin in range(0, SPANS, ROWS):
            batch = {key: x[begin : begin + ROWS].to(device) for key, x in spans.items()}
            squares.append(_squares(model, batch).cpu())
        error = float(torch.cat(squares).double().mean())
        return error / self._variance, float(self._deviation) * math.sqrt(error)


def _squares(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Squared errors of hidden readings."""
    predicted: Tensor = model(batch["values"], batch["times"], batch["hidden"])
    return (predicted.float() - batch["values"]).square()[batch["hidden"]]


def _metrics() -> tuple[Metric, ...]:
    axis = f"readings (of {HOURS} times as many hours)"
    metric = partial(Metric, axis=axis, lower_is_better=True)
    error = metric(
        key="error",
        label="Squared error of hidden readings",
        unit="share of the variance",
        trivial=1.0,
        trivial_rule="always the mean",
        description=f"{HIDDEN:.0%} of the readings of each held-out span are hidden. The "
        "rule is what always telling the mean reaches.",
        headline=True,
    )
    degrees = metric(
        key="degrees",
        label="Error of hidden readings",
        unit="°F (root mean square)",
        description="The same in degrees.",
    )
    return error, degrees, training_loss("share of the variance"), seen(error)


def _readings(place: str) -> tuple[Tensor, str]:
    """Temperatures of every hour of a year, and the first and the last day."""
    from vega_datasets import local_data

    datasets = {"Seattle": "seattle_temps", "San Francisco": "sf_temps"}
    if place not in datasets:
        raise ArgumentError(
            "place", expected=" or ".join(datasets), got=repr(place), remedy="Choose one."
        )
    table = getattr(local_data, datasets[place])()
    dates = f"{table.date.iloc[0]:%Y-%m-%d} to {table.date.iloc[-1]:%Y-%m-%d}"
    return torch.tensor(table.temp.to_numpy(), dtype=torch.float32), dates


def _spans(series: Tensor, rows: int, length: int, source: torch.Generator) -> dict[str, Tensor]:
    """Spans from anywhere in rows of a series, with their hours in order, some readings hidden."""
    hours = HOURS * length
    which = torch.randint(len(series), (rows, 1), generator=source)
    begins = torch.randint(series.shape[1] - hours + 1, (rows, 1), generator=source)
    order = torch.rand(rows, hours, generator=source).argsort(1)
    times = order[:, :length].sort(1).values
    hidden = torch.rand(rows, length, generator=source).argsort(1) < round(HIDDEN * length)
    return {"values": series[which, begins + times], "times": times.float(), "hidden": hidden}


ENTRY = TaskEntry(
    make=Temperatures,
    summary="Tell hidden temperatures of an irregularly sampled series from those around them",
    data="a year of hourly temperatures in Seattle or San Francisco (package vega_datasets), a "
    "quarter held out; 32 random hours of 96, 25 % of them hidden",
    metric="mean squared error as a share of the variance; in degrees",
    expectation="Irregular series are interpolated by attention over their real times (Shukla and "
    "Marlin 2021): a method that is given the times must be well ahead of the same one that is "
    "given the index of each reading (@index), and of the control nope.",
    sample={"test_lengths": (64,)},
    defaults=Defaults(
        encodings=("sinusoidal", "rope", "alibi", "t5"),
        references=("sinusoidal@index", "rope@index", "nope"),
        train_length=32,
        test_lengths=times(1, 2, 4),
        steps=1500,
        learning_rate=3e-3,
    ),
    options={"place": "Seattle"},
    length_unit="readings",
)
