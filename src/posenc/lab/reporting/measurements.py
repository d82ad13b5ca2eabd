"""The numbers of a study as one table, in the same form for every program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from posenc.lab.reporting.numbers import Estimate

COLUMNS = ("model", "method", "metric", "length", "at", "value", "low", "high", "count")
"""Columns of the table, as the fields of ``MeasuredValue``."""


@dataclass(frozen=True, kw_only=True)
class MeasuredValue:
    """A number that was measured: a row of the table.

    Args:
        model: what was measured: an encoding, a checkpoint or a layer.
        method: how it was run: an extension, a window, a backend; "" for as it is.
        metric: name of the quantity, with its unit if that is not the metric's own.
        length: tokens (pixels of an image's longer side); None where there is none.
        at: position or depth (0 to 1) within the length, or step of training.
        value: the number, a mean where there are several.
        low, high: ends of the 95 % interval; None where it is not known.
        count: how many were averaged.
    """

    model: str
    metric: str
    value: float
    method: str = ""
    length: int | None = None
    at: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 1

    @classmethod
    def of(cls, estimate: Estimate, **fields: object) -> MeasuredValue:
        """The row of a mean with its interval; ``fields`` are the others."""
        known = estimate.half_width is not None
        low, high = (estimate.low, estimate.high) if known else (None, None)
        return cls(value=estimate.mean, low=low, high=high, count=estimate.n, **fields)  # type: ignore[arg-type]


def measurements_csv(values: Iterable[MeasuredValue]) -> str:
    """The table as comma-separated values, with a head."""
    rows = [[getattr(value, column) for column in COLUMNS] for value in values]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).to_csv(index=False)
