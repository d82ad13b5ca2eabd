"""Bounds of a metric, and intervals within them."""

from __future__ import annotations

import math

from posenc.experiments.results import Metric
from posenc.experiments.statistics import Estimate
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


def interval(estimate: Estimate, bounds: Bounds, form: str, fine: str | None = None) -> str:
    """``±0.12``, or ``0.0% – 100.0%`` where the interval would leave what is possible.

    Args:
        form: format of the ends.
        fine: format of the half width; ``form`` by default.
    """
    if estimate.half_width is None:
        return ""
    low, high = bounds.clip(estimate.low), bounds.clip(estimate.high)
    if (low, high) == (estimate.low, estimate.high):
        return f"±{estimate.half_width:{fine or form}}"
    return f"{low:{form}} – {high:{form}}"
