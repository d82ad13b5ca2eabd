"""Temperatures at irregular hours: positions that are real times."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.recipe import Recipe, describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.tasks.common.interpolator import Interpolator, Timed
from posenc.experiments.tasks.common.task import (
    Defaults,
    Probe,
    TaskEntry,
    TaskSettings,
    probed,
    seen,
    times,
)
from posenc.models.stack import StackConfig
from posenc.training.memory_estimate import require_step, stack_bytes
from posenc.training.seeding import fingerprint, generator

__all__ = ["ENTRY"]

HOURS = 3
"""Hours of a span for each reading in it: 32 readings of 96 hours."""

HIDDEN = 0.25
"""Share of the readings that are to be told."""

STRETCH, EVERY = 480, 4
"""The year is cut into stretches of so many hours; each fourth is held out."""

SPANS, ROWS = 512, 64
"""Spans tested at a length, and at a time."""


class Temperatures:
    """Tell hidden readings of an irregularly sampled series from those around them.

    Positions are hours since the span began. A recipe that ends in ``@index`` counts readings
    instead (0, 1, 2, …), as if they were evenly spaced: what the same method does without times.

    Args:
        settings: of the comparison; lengths count readings.

    Raises:
        DataError: when the longest span is longer than a stretch of held-out hours.
    """

    title = "Hidden temperatures at irregular hours, told from those around them"
    training_unit = 1.0

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        series, dates = _readings(settings.options["place"])
        longest = HOURS * settings.lengths[-1]
        if longest > STRETCH:
            raise DataError(
                "test_lengths",
                expected=f"at most {STRETCH // HOURS} readings",
                got=settings.lengths[-1],
                remedy=f"Held-out stretches have {STRETCH} hours.",
            )
        train, held_out = _stretches(series)
        known = torch.cat(train)
        self._mean, self._deviation = known.mean(), known.std()
        self._train = [self._normal(stretch) for stretch in train]
        self._held_out = [self._normal(stretch) for stretch in held_out]
        self._variance = float(torch.cat(self._held_out).var())
        self.data = f"a year of hourly temperatures in {settings.options['place']} ({dates}), "
        self.data += f"{settings.train_length} random hours of {HOURS * settings.train_length}"
        digest = hashlib.sha256(series.numpy().tobytes()).hexdigest()
        self.corpus = Corpus(
            name=self.data,
            files=1,
            train_bytes=sum(map(len, train)),
            held_out_bytes=sum(map(len, held_out)),
            sha256=digest,
            unit="hours",
        )
        self.fingerprint = fingerprint(
            digest,
            settings.train_length,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
        )
        self.lengths = settings.lengths
        self.tokens_per_step = settings.batch * settings.train_length
        self.metrics = self._metrics()
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, HOURS * settings.train_length),
        )
        self._probes = [
            Probe(
                metrics=("error", "degrees"),
                x=length,
                run=lambda model, length=length: self._score(  # type: ignore[misc]
                    model, self._held_out, length
                ),
                needs=lambda model, length=length: self._bytes(  # type: ignore[misc]
                    model, ROWS, length, training=False
                ),
            )
            for length in self.lengths
        ]
        trained = settings.train_length
        self._probes.append(
            Probe(
                metrics=("seen",),
                x=trained,
                run=lambda model: self._score(model, self._train, trained)[:1],
            )
        )

    def build(self, encoding: str) -> Timed:
        """An ``Interpolator``; a learned table, if it has one, has the hours of a span."""
        recipe, settings = Recipe.parse(encoding), self._settings
        if recipe.positions not in ("plain", "index"):
            raise ArgumentError(
                "encoding",
                expected="times as positions, or their index",
                got=encoding,
                remedy=f"Write {recipe.encoding} or {recipe.encoding}@index.",
            )
        span = HOURS * settings.train_length
        config = StackConfig(
            dim=settings.width,
            heads=settings.heads,
            activation="gelu",
            norm="layer",
            bias=True,
            max_length=span,
        )
        model = Interpolator(
            config,
            encoding=recipe.encoding,
            options=fitted_options(recipe, span),
            layers=settings.layers,
        )
        return Timed(model, by_index=recipe.positions == "index")

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``values``, ``times`` and ``hidden``, all ``[batch, train_length]``."""
        rows, length = self._settings.batch, self._settings.train_length
        return _spans(self._train, rows, length, generator(seed, step))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error of hidden readings, in variances of the training data."""
        told = model(batch["values"], batch["times"], batch["hidden"])
        squares = (told.float() - batch["values"]).square()
        error: Tensor = squares[batch["hidden"]].mean()
        return error

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows, length = self._settings.batch, self._settings.train_length
        needed = self._bytes(model, rows, length, training=True)
        require_step(needed, available, rows=rows, length=length)

    def count(self, encoding: str) -> int:
        """One measurement a length, and one of hours trained on."""
        return len(self._probes)

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """Both errors at every length."""
        return probed(self._probes, model, subject=encoding, seed=seed, available=available)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model; ``Interpolator.load`` reads it."""
        cast(Timed, model).model.save(folder)

    @torch.inference_mode()
    def _score(
        self, model: nn.Module, stretches: Sequence[Tensor], length: int
    ) -> tuple[float, float]:
        device = next(model.parameters()).device
        spans = _spans(stretches, SPANS, length, generator(length))
        parts = []
        for begin in range(0, SPANS, ROWS):
            part = {key: x[begin : begin + ROWS].to(device) for key, x in spans.items()}
            told = model(part["values"], part["times"], part["hidden"])
            parts.append((told - part["values"]).square()[part["hidden"]].cpu())
        error = float(torch.cat(parts).double().mean())
        return error / self._variance, float(self._deviation) * math.sqrt(error)

    def _normal(self, series: Tensor) -> Tensor:
        return (series - self._mean) / self._deviation

    def _bytes(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        return stack_bytes(
            cast(Timed, model).model.config,
            layers=self._settings.layers,
            vocabulary=0,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rows=rows,
            length=length,
            training=training,
        )

    def _metrics(self) -> tuple[Metric, ...]:
        axis = f"readings (of {HOURS} times as many hours)"
        log_x = self.lengths[-1] > 2 * self.lengths[0]
        error = Metric(
            key="error",
            label="Squared error of hidden readings",
            unit="share of the variance",
            axis=axis,
            lower_is_better=True,
            chance=1.0,
            description=f"{HIDDEN:.0%} of the readings of each held-out span are hidden. The "
            "rule is what always telling the mean reaches.",
            headline=True,
            log_x=log_x,
        )
        return (
            error,
            Metric(
                key="degrees",
                label="Error of hidden readings",
                unit="°F (root mean square)",
                axis=axis,
                lower_is_better=True,
                chance=None,
                description="The same in degrees.",
                headline=False,
                log_x=log_x,
            ),
            Metric(
                key="training_loss",
                label="Training loss",
                unit="share of the variance",
                axis="training step",
                lower_is_better=True,
                chance=None,
                description="Mean over the steps since the point before.",
                headline=False,
                log_x=False,
            ),
            seen(error),
        )


def _readings(place: str) -> tuple[Tensor, str]:
    """Temperatures of every hour of a year, and which year."""
    from vega_datasets import local_data

    named = {"Seattle": "seattle_temps", "San Francisco": "sf_temps"}
    if place not in named:
        raise ArgumentError(
            "place", expected=" or ".join(named), got=repr(place), remedy="Choose one."
        )
    table = getattr(local_data, named[place])()
    years = f"{table.date.iloc[0]:%Y-%m-%d} to {table.date.iloc[-1]:%Y-%m-%d}"
    return torch.tensor(table.temp.to_numpy(), dtype=torch.float32), years


def _stretches(series: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Stretches to train on, and held-out ones from all over the year."""
    parts = [part for part in torch.split(series, STRETCH) if len(part) == STRETCH]
    held_out = parts[EVERY - 1 :: EVERY]
    train = [part for index, part in enumerate(parts) if index % EVERY != EVERY - 1]
    return train, held_out


def _spans(
    stretches: Sequence[Tensor], rows: int, length: int, source: torch.Generator
) -> dict[str, Tensor]:
    """Spans from anywhere in the stretches, with their hours in order, some readings hidden."""
    series, hours = torch.stack(list(stretches)), HOURS * length
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
