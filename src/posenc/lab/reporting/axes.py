"""Rules across charts, and shaded ranges."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from posenc.lab.reporting.palette import CONTROL


def of_field(axis: alt.X | alt.Y, field: str) -> Any:
    """A copy of the axis for another field."""
    other = axis.copy()
    other.shorthand = field
    return other


def constant(channel: Any, value: float | str) -> Any:
    """A value of a channel, in pixels or by the name of a size."""
    return channel(value)


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
    return [
        line,
        text.encode(x=constant(alt.XValue, 0 if left else "width"), text=alt.Text("label:N")),
    ]


def shade(axis: alt.X, begin: float, end: float, label: str, *, top: bool = False) -> list[Any]:
    """A shaded range of a horizontal axis over the whole height, named at its beginning.

    Args:
        top: write the name above rather than below.
    """
    data = pd.DataFrame({"begin": [begin], "end": [end], "label": [label]})
    area = (
        alt.Chart(data)
        .mark_rect(color="--shade")
        .encode(
            x=of_field(axis, "begin:Q"),
            x2=alt.X2("end:Q"),
            y=constant(alt.YValue, 0),
            y2=constant(alt.Y2Value, "height"),
        )
    )
    text = alt.Chart(data).mark_text(
        align="left", baseline="top" if top else "bottom", dx=4, dy=5 if top else -5, color="--soft"
    )
    at = constant(alt.YValue, 0 if top else "height")
    return [area, text.encode(x=of_field(axis, "begin:Q"), y=at, text=alt.Text("label:N"))]
