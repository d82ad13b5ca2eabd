"""Annotations of charts: rules, shaded ranges, and names of lines at their ends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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


LINE_HEIGHT, TIGHT = 15.0, 13.0
"""Pixels from one name to the next, and where there are many."""

MANY = 10
"""More names than these are set tight."""

LONGEST, LONGEST_LEFT = 17, 9
"""Characters of a line of a name on the right, of which there are two, and on the left."""


LONGEST_END, NEAR = 11, 4
"""Characters of the end of a name whose middle is left out, and of the start of a word in it."""


def spaced(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The numbers closest to ``wanted`` that keep a distance of ``gap``, in the same order.

    Numbers that are too close are moved apart around their mean (pool adjacent violators), then
    into the range from ``low`` to ``high``; where that is too small, the gap is.
    """
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[tuple[float, int]] = []  # mean without gaps, and size
    for place, index in enumerate(order):
        mean, size = wanted[index] - gap * place, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    level = [mean for mean, size in blocks for _ in range(size)]
    most = high - gap * (len(wanted) - 1)
    placed = [0.0] * len(wanted)
    for place, index in enumerate(order):
        placed[index] = min(max(level[place], low), most) + gap * place
    return placed


def broken(name: str, *, lines: int = 2) -> str:
    """A name in lines of at most ``LONGEST`` characters, cut only where the last one is longer.

    It is broken behind a space, comma, colon or equals sign, but not in parentheses.
    """
    if len(name) <= LONGEST:
        return name
    breaks = [match.end() for match in re.finditer(r"[ ,:=]+(?![^(]*\))", name)]
    fits = [at for at in breaks if len(name[:at].rstrip()) <= LONGEST]
    if lines == 1 or not fits:
        return f"{name[: LONGEST - 1]}…"
    return f"{name[: fits[-1]].rstrip()}\n{broken(name[fits[-1] :], lines=lines - 1)}"


def distinct(names: Sequence[str], *, lines: int = 2) -> dict[str, str]:
    """Names as they are shown: ``broken``, no two alike.

    Those that would be cut to the same text are cut before the part in which they differ instead.
    """
    shown = {name: broken(name, lines=lines) for name in names}
    for alike in _alike(shown):
        shown |= _cut_within(alike)
    return shown


def _alike(shown: Mapping[str, str]) -> list[list[str]]:
    """Names that are shown alike, together."""
    groups: dict[str, list[str]] = {}
    for name, text in shown.items():
        groups.setdefault(text, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _cut_within(names: Sequence[str]) -> dict[str, str]:
    """Names that start alike, their common start replaced by an ellipsis after some letters."""
    places = enumerate(zip(*names, strict=False))
    start = next((n for n, letters in places if len(set(letters)) > 1), min(map(len, names)))
    words = [match.end() for match in re.finditer(r"[ ,:=]+", names[0][:start])]
    if words and start - words[-1] <= NEAR:
        start = words[-1]
    cut = {}
    for name in names:
        end = name[start:]
        end = end if len(end) <= LONGEST_END else f"{end[: LONGEST_END - 1]}…"
        cut[name] = f"{name[: LONGEST - 1 - len(end)]}…{end}"
    for alike in _alike(cut):
        if len(alike) < len(names):
            cut |= _cut_within(alike)
    return cut


def line_names(
    ends: pd.DataFrame,
    x: alt.X,
    y: alt.Y,
    *,
    height: int,
    left_of: float,
    colour: Any,
    opacity: Any,
) -> list[Any]:
    """Layers with the name of each line right of its end, none over another.

    Args:
        ends: of the lines: ``subject``, ``x`` and ``mean``.
        x, y: axes of the chart, that of ``y`` with its domain.
        height: pixels of the plot, where it is lowest.
        left_of: short names of lines that end here or before stand on the left of their end.
        colour, opacity: of the lines.
    """
    height_axis: Any = y.to_dict()
    scale = height_axis["scale"]
    log = scale.get("type") == "log"
    low, high = map(math.log10, scale["domain"]) if log else scale["domain"]
    many = len(ends) > MANY
    gap, size, away = (TIGHT, 11, 24) if many else (LINE_HEIGHT, 12, 10)
    shown = distinct(list(ends.subject), lines=1 if many else 2)
    gap *= 1 + max((name.count("\n") for name in shown.values()), default=0)
    rows: list[pd.DataFrame] = []
    for _, group in ends.groupby("x", sort=True):
        wanted = [math.log10(mean) if log else mean for mean in group["mean"]]
        placed = spaced(wanted, gap * (high - low) / height, low, high)
        placed = [10.0**at for at in placed] if log else placed
        rows.append(group.assign(at=placed, name=[shown[name] for name in group.subject]))
    data = pd.concat(rows) if rows else ends.assign(at=[], name=[])
    on_left = (data.x <= left_of) & (data.subject.str.len() <= LONGEST_LEFT)
    double = data.name.str.contains("\n")
    layers: list[Any] = []
    sides: tuple[tuple[Any, int, Literal["left", "right"], float], ...]
    sides = (
        (data[on_left], -1, "right", 0.0),
        (data[~on_left & ~double], 1, "left", 0.0),
        (data[double], 1, "left", -TIGHT / 2),  # the first line, as far above as the other below
    )
    for here, sign, side, up in sides:
        if here.empty:
            continue
        base = alt.Chart(here).encode(x=x, opacity=opacity)
        link = base.mark_rule(strokeWidth=1, xOffset=4 * sign, x2Offset=(away - 2) * sign)
        text = base.encode(y=of_field(y, "at:Q"), text=alt.Text("name:N"))
        layers.append(
            link.encode(x2=alt.X2("x:Q"), y=of_field(y, "mean:Q"), y2=alt.Y2("at:Q"), color=colour)
        )
        layers += [
            text.mark_text(
                align=side,
                baseline="middle",
                dx=away * sign,
                dy=up,
                fontSize=size,
                lineBreak="\n",
                lineHeight=TIGHT,
                **ink,
            )
            # First around the letters, so that they can be read over lines.
            for ink in (
                {"color": "--paper", "stroke": "--paper", "strokeWidth": 3.0},
                {"color": "--ink"},
            )
        ]
    return layers
