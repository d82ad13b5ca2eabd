"""Bounds of a metric."""

from __future__ import annotations

import math

from posenc.experiments.results import Metric
from posenc.visualization.bounds import Bounds

SHARES = Bounds(0.0, 1.0)


def bounds_of(metric: Metric, *, changed: bool = False) -> Bounds:
    """Range of a metric, or of its change from the training length.

    Shares of what is right end at 1; errors, which may be shares too, are only positive. Changes
    of shares are differences, of other metrics parts of the value at the training length.
    """
    if metric.is_share and not metric.lower_is_better:
        return Bounds(-1.0, 1.0) if changed else SHARES
    return Bounds(-math.inf if metric.is_share else -1.0) if changed else Bounds(0.0)
