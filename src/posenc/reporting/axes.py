"""Layers of charts as Vega-Lite has them: rules across, and shaded ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posenc.reporting.palette import CONTROL

Channel = dict[str, Any]
"""Where a mark is, or how it looks: a field of the data, or a value."""

Rows = Sequence[Mapping[str, Any]]

Layer = dict[str, Any]


def measured(field: str, **how: Any) -> Channel:
    """The channel of a field of numbers."""
    return {"field": field, "type": "quantitative", **how}


def named(field: str, **how: Any) -> Channel:
    """The channel of a field of words."""
    return {"field": field, "type": "nominal", **how}


def of_field(axis: Channel, field: str) -> Channel:
    """The same axis of another field."""
    return {**axis, "field": field}


def layer(rows: Rows, mark: str, how: Mapping[str, Any], **encoding: Any) -> Layer:
    """Marks, one a row; layers of the same ``rows`` share them in a chart."""
    return {"data": rows, "mark": {"type": mark, **how}, "encoding": encoding}


def rule(axis: Channel, at: float, label: str, *, left: bool = False) -> list[Layer]:
    """A dashed rule at a value of a vertical axis, labelled at its end, or at its left one."""
    rows = [{"at": at, "label": label}]
    y, x = of_field(axis, "at"), {"value": 0 if left else "width"}
    place: Channel = {"align": "left" if left else "right", "baseline": "bottom"}
    place |= {"dx": 5 if left else 0, "dy": -3, "color": "--soft"}
    line = {"strokeDash": [5, 4], "color": CONTROL, "strokeWidth": 1.2}
    return [
        layer(rows, "rule", line, y=y),
        layer(rows, "text", place, x=x, y=y, text=named("label")),
    ]


def shade(axis: Channel, begin: float, end: float, label: str, *, top: bool = False) -> list[Layer]:
    """A shaded range of a horizontal axis over the whole height, named at its beginning.

    Args:
        top: write the name above rather than below.
    """
    rows = [{"begin": begin, "end": end, "label": label}]
    x, height = of_field(axis, "begin"), {"value": "height"}
    place: Channel = {"align": "left", "baseline": "top" if top else "bottom"}
    place |= {"dx": 4, "dy": 5 if top else -5, "color": "--soft"}
    at = {"value": 0} if top else height
    return [
        layer(
            rows, "rect", {"color": "--shade"}, x=x, x2={"field": "end"}, y={"value": 0}, y2=height
        ),
        layer(rows, "text", place, x=x, y=at, text=named("label")),
    ]
