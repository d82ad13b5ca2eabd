"""Measurements of trained models, or the reasons why they cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from posenc.errors import ArgumentError, LengthError
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.training.machine import gigabytes


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
