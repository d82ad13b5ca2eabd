"""Charts of named lines and amounts, drawn by Altair from plain records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, cast

import altair as alt
import pandas as pd

from posenc.lab.reporting.annotations import (
    LINE_HEIGHT,
    MANY,
    TIGHT,
    line_names,
    of_field,
    rule,
    shade,
)
from posenc.lab.reporting.charts import PICTURE_WIDTH, Chart, text_of
from posenc.lab.reporting.numbers import UNBOUNDED, Bounds, Estimate
from posenc.lab.reporting.palette import CONTROL, SERIES, SHAPES

FEW = 90
"""Points up to which a chart has large ones, and a dot a run."""

DASHES: dict[str, list[int]] = {"candidate": [1, 0], "baseline": [7, 4], "control": [2, 3]}

HEIGHT, NARROW_HEIGHT = 400, 300
"""Pixels of the plot of the first chart, and on a narrow page."""

SMALL_HEIGHT, SMALL_WIDTH = 230, 420
"""Pixels of the plots of the others, which stand side by side, and of their pictures."""

BEFORE = 0.16
"""Part of an axis of lengths that shows the trained range."""


TICKS = 6
"""Steps that an axis is divided into, roughly."""

PLAIN = "abs(datum.value) < 1 ? format(datum.value, '~g') : format(datum.value, '~s')"
"""Labels such as 0.01, 10 and 100k; a prefix below one reads as a unit, as 10m does."""

LEAST_SHARE = 0.05
LEAST_FRACTION = 0.02
"""Shortest axis: of shares, and of other values as a part of the largest."""


@dataclass(frozen=True)
class Look:
    """Colour (by its name), dashes and mark of a line, the same in all charts of a page."""

    colour: str
    dash: list[int]
    shape: str


def looks(roles: Mapping[str, str]) -> dict[str, Look]:
    """Looks by name: candidates in colours, references in grey, baselines dashed, controls dotted.

    Args:
        roles: name → ``candidate``, ``baseline`` or ``control``.
    """
    candidates = [name for name, role in roles.items() if role == "candidate"]
    colours = dict(zip(candidates, cycle(SERIES), strict=False))
    return {
        name: Look(colours.get(name, CONTROL), DASHES[role], shape)
        for (name, role), shape in zip(roles.items(), cycle(SHAPES), strict=False)
    }


@dataclass(frozen=True)
class Point:
    """A value of a named line at one place.

    Args:
        name: of the line.
        x: the place.
        value: with its interval.
        shown: the value in words.
        runs: the values that it is the mean of, if they are drawn.
    """

    name: str
    x: float
    value: Estimate
    shown: str
    runs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Across:
    """A horizontal axis.

    Args:
        title: of the axis, with the unit.
        trained: end of the trained range, which is shaded; None: none.
        lengths: ascending, each with a tick; none: any places from zero on.
        log: on a log scale.
    """

    title: str
    trained: int | None = None
    lengths: tuple[int, ...] = ()
    log: bool = False

    def axis(self) -> tuple[alt.X, float]:
        """The axis, and where it begins: of lengths, before the trained one."""
        if not self.lengths:
            axis = alt.Axis(tickCount=5, grid=False)
            scale = alt.Scale(zero=True, nice=False)
            return alt.X("x:Q", title=self.title, axis=axis, scale=scale), 0.0
        first, last = self.lengths[0], self.lengths[-1]
        trained = first if self.trained is None else self.trained
        if first == last:
            scale, low = alt.Scale(domain=[0, 2 * last]), float(last)
        elif self.log:
            low = min(first, trained * (trained / last) ** (BEFORE / (1 - BEFORE)))
            scale = alt.Scale(type="log", base=2, domain=[low, last], nice=False)
        else:
            low = min(first, trained - (last - trained) * BEFORE / (1 - BEFORE))
            scale = alt.Scale(domain=[low, last], nice=False, zero=False)
        label = "format(datum.value, 'd')"
        if self.trained:
            label = f"[{label}, format(datum.value / {trained}, '.3~g') + ' ×']"
        axis = alt.Axis(values=list(self.lengths), labelExpr=label, grid=False)
        return alt.X("x:Q", title=self.title, axis=axis, scale=scale), low


@dataclass(frozen=True, kw_only=True)
class Up:
    """A vertical axis, whose ticks have as many digits as tell them apart.

    Args:
        title: of the axis, with the unit.
        lower: lower values are better.
        percent: values are shares, shown in per cent.
        signed: positive values have a plus.
        zero: the axis begins at zero, or ends there.
        bounds: of possible values, beyond which it does not go.
        log: on a log scale, of positive values, with a tick a power of ten.
        level, level_name: a value that is ruled, unless it is far above all others.
    """

    title: str
    lower: bool = False
    percent: bool = False
    signed: bool = False
    zero: bool = False
    bounds: Bounds = UNBOUNDED
    log: bool = False
    level: float | None = None
    level_name: str = ""

    def axis(self, values: Iterable[float]) -> alt.Y:
        """The axis around all values that are to be seen; those not finite are left out."""
        if self.log:
            finite = [value for value in values if 0 < value < math.inf] or [1.0]
            first, last = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
            powers = [10.0**n for n in range(first, max(last, first + 1) + 1)]
            axis = alt.Axis(values=powers, labelExpr=PLAIN)
            scale = alt.Scale(type="log", domain=[powers[0], powers[-1]], nice=False)
            return alt.Y("mean:Q", title=self.title, axis=axis, scale=scale)
        clip = self.bounds.clip
        finite = [value for value in values if math.isfinite(value)] + ([0.0] if self.zero else [])
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        least = LEAST_SHARE if self.percent else LEAST_FRACTION * (max(abs(low), abs(high)) or 1.0)
        if high - low < least:
            middle = (low + high) / 2
            low, high = clip(middle - least / 2), clip(middle + least / 2)
        step = _step((high - low) / TICKS)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [clip(step * n) for n in range(first, last + 1)]
        digits = max(0, -math.floor(math.log10(step * (100 if self.percent else 1)) + 1e-9))
        form = f"format(datum.value, '.{digits}{'%' if self.percent else 'f'}')"
        if self.signed:
            form = f"datum.value > 0 ? '+' + {form} : {form}"
        axis = alt.Axis(values=sorted(set(ticks)), labelExpr=form)
        scale = alt.Scale(domain=[ticks[0], ticks[-1]], nice=False)
        return alt.Y("mean:Q", title=self.title, axis=axis, scale=scale)


def _step(width: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= width * (1 - 1e-9))


class Drawing:
    """Draws the charts of one page, in which a name can be picked.

    Args:
        names: of the lines, in order.
        looks: of each.
        noun: what a line stands for.
    """

    def __init__(self, names: Sequence[str], looks: Mapping[str, Look], noun: str) -> None:
        self.names, self.noun = list(names), noun

        def by_name(channel: Any, values: list[Any]) -> Any:
            scaled = channel("subject:N", sort=self.names, legend=None)
            return scaled.scale(domain=self.names, range=values)

        self.colour = by_name(alt.Color, [looks[name].colour for name in names])
        self.shape = by_name(alt.Shape, [looks[name].shape for name in names])
        self.dash = by_name(alt.StrokeDash, [looks[name].dash for name in names])
        self.dim = self._unless_dimmed(alt.OpacityValue, 1.0, 0.12)

    @staticmethod
    def _unless_dimmed(channel: Any, value: float, dimmed: float) -> Any:
        """A value of a channel for what is picked, and for all if nothing is."""
        chosen = {"test": "picked === '' || datum.subject === picked", "value": value}
        return channel(dimmed, condition=chosen)

    def lines(
        self,
        key: str,
        title: str,
        guide: str,
        points: Sequence[Point],
        axes: tuple[Across, Up],
        *,
        first: bool = False,
    ) -> Chart:
        """Lines with bands, points and names, and rules at a level.

        Args:
            key, title, guide: of the chart.
            points: of the lines, each in the order of x.
            axes: across and up.
            first: larger than the others, with a dot a run.
        """
        across, up = axes
        columns = ["subject", "x", "mean", "low", "high", "shown", "n"]
        rows = [
            (p.name, p.x, p.value.mean, p.value.low, p.value.high, p.shown, p.value.n)
            for p in points
        ]
        data = pd.DataFrame(rows, columns=columns)
        runs = [(p.name, p.x, run) for p in points for run in p.runs]
        dots = pd.DataFrame(runs, columns=columns[:3])
        x, start = across.axis()
        level = up.level
        if level is not None and (data.empty or level > 1.1 * float(data.high.max())):
            level = None
        ruled = [] if level is None else [level]
        y = up.axis([*data.low, *data.high, *dots["mean"], *ruled])
        layers = self._layers(data, dots, x, y, first=first)
        if level is not None:
            # Lines by length begin close together; those by pair rise from the left corner.
            layers = rule(y, level, up.level_name, left=not across.lengths) + layers
        end = across.trained
        if end is not None and start < end:
            layers = shade(x, start, end, "trained" if first else "", top=up.lower) + layers
        shown = set(data.subject)
        drawn = [name for name in self.names if name in shown]
        many = len(drawn) > MANY
        narrow = HEIGHT if len(drawn) * TIGHT > NARROW_HEIGHT else NARROW_HEIGHT
        ends = data.sort_values("x").groupby("subject", sort=False).tail(1)
        if not first:  # names of points on the axis have no room, nor have many
            ends = ends[(ends.x > data.x.min()) & (not many)]
        if len(ends):
            layers += line_names(
                ends,
                x,
                y,
                height=narrow if first else SMALL_HEIGHT,
                left_of=end if first and end is not None and start < end else -math.inf,
                colour=self.colour,
                opacity=self.dim,
            )
        series = [(name, [(p.x, p.shown) for p in points if p.name == name]) for name in drawn]
        return Chart.of(
            key,
            title,
            guide,
            layers,
            text_of(title, (across.title, up.title), series),
            width=PICTURE_WIDTH if first else SMALL_WIDTH,
            height=HEIGHT if first else SMALL_HEIGHT,
            narrow=narrow if first else None,
        )

    def _layers(
        self, data: pd.DataFrame, dots: pd.DataFrame, x: alt.X, y: alt.Y, *, first: bool
    ) -> list[Any]:
        """Bands, runs, lines and points."""
        titles = [cast(dict[str, Any], axis.to_dict())["title"] for axis in (x, y)]
        tooltip = [
            alt.Tooltip("subject", title=self.noun),
            alt.Tooltip("x", title=titles[0]),
            alt.Tooltip("shown", title=titles[1]),
        ]
        if (data.n > 1).any():
            tooltip.append(alt.Tooltip("n", title="seeds"))
        base = alt.Chart(data).encode(x=x, y=y, color=self.colour)
        line = base.mark_line(strokeWidth=2.2).encode(strokeDash=self.dash, opacity=self.dim)
        few = len(data) < FEW
        size = (64 if first else 36) if few else 12
        point = base.mark_point(size=size, filled=True).encode(
            shape=self.shape, opacity=self.dim, tooltip=tooltip
        )
        band = base.mark_area().encode(
            y=of_field(y, "low:Q"),
            y2=alt.Y2("high:Q"),
            # Not opacity, for which a rasteriser draws each band into a layer of its own.
            fillOpacity=self._unless_dimmed(alt.FillOpacityValue, 0.16, 0.02),
        )
        layers = [band] if (data.low < data.high).any() else []
        if few and first and not dots.empty:
            circles = alt.Chart(dots).mark_circle(size=14, clip=True)
            layers.append(circles.encode(x=x, y=y, color=self.colour, opacity=self.dim))
        return [*layers, line, point]

    def amounts(
        self,
        key: str,
        titles: tuple[str, str],
        guide: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        first: bool = False,
        level: float | None = None,
    ) -> Chart:
        """A row a name, the largest amount first: names need no room of their own on an axis.

        Args:
            key: of the chart.
            titles: of the chart, and of the amount with its unit.
            guide: of the chart.
            rows: ``subject``, ``amount``, and further facts in words for the tooltip.
            first: larger than the others.
            level: an amount that is ruled.
        """
        title, across = titles
        data = pd.DataFrame(rows)
        names = list(data.sort_values("amount", ascending=False).subject)
        base = alt.Chart(data).encode(
            x=alt.X("amount:Q", title=across, axis=alt.Axis(labelExpr=PLAIN, tickCount=4)),
            y=alt.Y("subject:N", title=None, sort=names).axis(
                labelLimit=140, grid=False, labelColor="--ink", domain=False, ticks=False
            ),
            color=self.colour,
            opacity=self.dim,
        )
        facts = [name for name in data.columns if name not in ("subject", "amount")]
        tooltip = [
            alt.Tooltip("subject", title=self.noun),
            alt.Tooltip("amount", title=across, format=",.3~r"),
            *(alt.Tooltip(fact) for fact in facts),
        ]
        stems = base.mark_rule(strokeWidth=2).encode(x2=alt.X2Datum(0), strokeDash=self.dash)
        points = base.mark_point(size=60, filled=True, opacity=1).encode(
            shape=self.shape, tooltip=tooltip
        )
        series = [(row["subject"], [(row["amount"], row[facts[0]])]) for row in rows]
        ruled: list[Any] = []
        if level is not None:
            at = alt.Chart(pd.DataFrame({"amount": [level]})).encode(x=alt.X("amount:Q"))
            ruled = [at.mark_rule(strokeDash=[5, 4], color=CONTROL, strokeWidth=1.2)]
        return Chart.of(
            key,
            title,
            guide,
            [*ruled, stems, points],
            text_of(title, (across, facts[0]), series),
            width=PICTURE_WIDTH if first else SMALL_WIDTH,
            height=max(SMALL_HEIGHT, round(LINE_HEIGHT * len(names))),
        )
