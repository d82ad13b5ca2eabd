"""Value axes whose tick labels differ, rules across charts, and shaded ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import altair as alt
import pandas as pd

from posenc.reporting.intervals import Bounds
from posenc.reporting.palette import CONTROL

TICKS = 6
"""Steps that an axis is divided into, roughly."""

LEAST_SHARE = 0.05
LEAST_PART = 0.02
"""Shortest axis: of shares, and of other values as a part of the largest."""


def value_axis(
    values: Iterable[float],
    title: str,
    *,
    percent: bool = False,
    signed: bool = False,
    zero: bool = False,
    bounds: Bounds | None = None,
    log: bool = False,
) -> alt.Y:
    """A vertical axis around ``values``, whose ticks have as many digits as tell them apart.

    Args:
        values: all that is to be seen; those not finite are left out.
        title: of the axis, with the unit.
        percent: whether values are shares, shown in per cent.
        signed: whether positive values have a plus.
        zero: whether it begins at zero, or ends there.
        bounds: what it does not go beyond.
        log: whether it is logarithmic, of positive values, with a tick a power of ten.
    """
    if log:
        seen = [value for value in values if 0 < value < math.inf] or [1.0]
        first, last = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
        powers = [10.0**n for n in range(first, max(last, first + 1) + 1)]
        axis = alt.Axis(values=powers, format="~s")
        scale = alt.Scale(type="log", domain=[powers[0], powers[-1]], nice=False)
        return alt.Y("mean:Q", title=title, axis=axis, scale=scale)
    limits = bounds or Bounds()
    seen = [value for value in values if math.isfinite(value)] + ([0.0] if zero else [])
    low, high = (min(seen), max(seen)) if seen else (0.0, 1.0)
    least = LEAST_SHARE if percent else LEAST_PART * (max(abs(low), abs(high)) or 1.0)
    if high - low < least:
        middle = (low + high) / 2
        low, high = limits.clip(middle - least / 2), limits.clip(middle + least / 2)
    step = _step((high - low) / TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [limits.clip(step * n) for n in range(first, last + 1)]
    digits = max(0, -math.floor(math.log10(step * (100 if percent else 1)) + 1e-9))
    kind = "%" if percent else "f"
    form = f"format(datum.value, '.{digits}{kind}')"
    if signed:
        form = f"datum.value > 0 ? '+' + {form} : {form}"
    axis = alt.Axis(values=sorted(set(ticks)), labelExpr=form)
    return alt.Y("mean:Q", title=title, axis=axis).scale(domain=[ticks[0], ticks[-1]], nice=False)


def _step(width: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= width * (1 - 1e-9))


def of_field(axis: alt.X | alt.Y, field: str) -> Any:
    """The same axis of another field."""
    other = axis.copy()
    other.shorthand = field
    return other


def rule(axis: alt.Y, at: float, label: str, *, left: bool = False) -> list[Any]:
    """A dashed rule at a value of a vertical axis, labelled at its end, or at its left one."""
    base = alt.Chart(pd.DataFrame({"at": [at], "label": [label]})).encode(y=of_field(axis, "at:Q"))
    line = base.mark_rule(strokeDash=[5, 4], color=CONTROL, strokeWidth=1.2)
    text = base.mark_text(
        align="left" if left else "right",
        baseline="bottom",
        dx=5 if left else 0,
        dy=-3,
        color="--soft",
    )
    return [line, text.encode(x=alt.value(0 if left else "width"), text="label:N")]


def shade(axis: alt.X, begin: float, end: float, label: str, *, top: bool = False) -> list[Any]:
    """A shaded range of a horizontal axis over the whole height, named at its beginning.

    Args:
        top: write the name above rather than below.
    """
    data = pd.DataFrame({"begin": [begin], "end": [end], "label": [label]})
    area = (
        alt.Chart(data)
        .mark_rect(color="--shade")
        .encode(x=of_field(axis, "begin:Q"), x2="end:Q", y=alt.value(0), y2=alt.value("height"))
    )
    text = alt.Chart(data).mark_text(
        align="left", baseline="top" if top else "bottom", dx=4, dy=5 if top else -5, color="--soft"
    )
    at = alt.value(0 if top else "height")
    return [area, text.encode(x=of_field(axis, "begin:Q"), y=at, text="label:N")]
