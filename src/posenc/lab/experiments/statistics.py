"""Comparisons of encodings, seed by seed, and the bounds of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from posenc.lab.experiments.results import Metric
from posenc.lab.reporting.numbers import SHARES, Bounds, Estimate, estimate, paired_difference
from posenc.lab.reporting.opening import HOLDS, deterioration

MARGIN = 0.02
"""With one seed, values that differ by at most this share of the larger count as the same."""

HIGHEST = {"BLEU": 100.0, "chrF": 100.0}
"""Units of scores that end somewhere, and where."""


def compared(
    metric: Metric, a: Mapping[int, float], b: Mapping[int, float]
) -> Literal["better", "worse", "same"] | None:
    """Compare ``a`` with ``b`` by the interval of their paired difference.

    With one seed in common, by ``MARGIN``; None without any.

    Args:
        metric: of the values.
        a, b: seed to value.
    """
    gap = paired_difference(a, b)
    if gap is None:
        return None
    if gap.half_width is None:
        largest = max(abs(value) for seed in a.keys() & b.keys() for value in (a[seed], b[seed]))
        differs = abs(gap.mean) > MARGIN * largest
    else:
        differs = gap.sure
    if not differs:
        return "same"
    return "better" if (gap.mean < 0) == metric.lower_is_better else "worse"


def change(metric: Metric, base: Mapping[int, float], last: Mapping[int, float]) -> Estimate | None:
    """Deterioration from ``base`` to ``last`` as a share of ``base``, seed by seed.

    Args:
        metric: of the values.
        base, last: seed to value.
    """
    most = Bounds(low=-1.0) if metric.lower_is_better else Bounds(high=1.0)
    return estimate(
        (
            deterioration(last[seed], base[seed], lower=metric.lower_is_better)
            for seed in sorted(base.keys() & last.keys())
        ),
        most,
    )


def held(values: Mapping[int, Estimate], metric: Metric, train: int) -> int:
    """The longest length up to which the mean holds.

    Args:
        values: length to estimate of the metric.
        metric: of the values.
        train: training length, one of ``values``.
    """
    last = train
    for length in sorted(values):
        means = values[length].mean, values[train].mean
        if deterioration(*means, lower=metric.lower_is_better) > HOLDS:
            break
        last = length
    return last


def bounds_of(metric: Metric, *, changed: bool = False) -> Bounds:
    """Range of a metric, or of its change from the training length.

    Shares of what is right end at 1, scores where their unit does; errors, which may be shares
    too, are only positive. Changes of shares are differences, of other metrics parts of the value
    at the training length.
    """
    if metric.is_share and not metric.lower_is_better:
        return Bounds(-1.0, 1.0) if changed else SHARES
    if changed:
        return Bounds(-math.inf if metric.is_share else -1.0)
    return Bounds(0.0, HIGHEST.get(metric.unit, math.inf))
