"""The charts of a report, drawn by Altair from a comparison's records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import altair as alt
import pandas as pd

from posenc.experiments.bounds import bounds_of
from posenc.experiments.results import Comparison, Metric
from posenc.experiments.statistics import estimate
from posenc.experiments.summary import Summary
from posenc.visualization.axes import of_field, rule, shade, value_axis
from posenc.visualization.charts import PICTURE_WIDTH, Chart, text_of
from posenc.visualization.colours import CONTROL, SERIES, SHAPES
from posenc.visualization.line_names import LINE_HEIGHT, MANY, line_names

FEW = 90
"""Points up to which a chart has large ones, and a dot a seed."""

DASHES: dict[str, list[int]] = {"candidate": [1, 0], "baseline": [7, 4], "control": [2, 3]}

HEIGHT, NARROW_HEIGHT = 400, 300
"""Pixels of the plot of the first chart, and on a narrow page."""

SMALL_HEIGHT, SMALL_WIDTH = 230, 420
"""Pixels of the plots of the others, which stand side by side, and of their pictures."""

BEFORE = 0.16
"""Part of an axis of test lengths that shows the trained range."""


@dataclass(frozen=True)
class Look:
    """Colour (by its name), dashes and mark of a subject, the same in all charts."""

    colour: str
    dash: list[int]
    shape: str


def looks(comparison: Comparison) -> dict[str, Look]:
    """By label: candidates in colours, references in grey, baselines dashed and controls dotted."""
    candidates = [s.label for s in comparison.subjects if s.role == "candidate"]
    colours = dict(zip(candidates, cycle(SERIES), strict=False))
    return {
        subject.label: Look(colours.get(subject.label, CONTROL), DASHES[subject.role], shape)
        for subject, shape in zip(comparison.subjects, cycle(SHAPES), strict=False)
    }


def draw_charts(comparison: Comparison, summary: Summary) -> list[Chart]:
    """All charts that the comparison has the measurements for, the deciding one first."""
    drawing = _ComparisonCharts(comparison, summary)
    charts = []
    if drawing.measured(comparison.headline):
        charts.append(drawing.headline())
    recall = comparison.metric("recall")
    if recall is not None and drawing.measured(recall):
        guide = "A flat loss alone does not show that something far back can still be found."
        charts.append(drawing.curve(recall, guide))
    if charts and len(comparison.test_lengths) > 1 and drawing.changes():
        charts.append(drawing.change())
    guides = {
        "loss_by_position": "Where a line falls, the model uses the further context; where it "
        "jumps, positions it was not trained at mislead it.",
        "training_loss": "Lines that still fall at the end would gain from more steps.",
    }
    others = (
        metric
        for metric in comparison.metrics
        if not metric.headline and metric.key not in ("seen", "recall") and drawing.measured(metric)
    )
    charts += [drawing.curve(metric, guides.get(metric.key, "")) for metric in others]
    if any(row.tokens_per_second for row in summary.rows):
        charts.append(drawing.speed())
    return charts


class _ComparisonCharts:
    """Draws the charts of one comparison, in which a name can be picked."""

    def __init__(self, comparison: Comparison, summary: Summary) -> None:
        self.comparison, self.rows = comparison, summary.rows
        labels = [row.subject.label for row in self.rows]
        own = looks(comparison)

        def by_subject(channel: Any, values: list[Any]) -> Any:
            scaled = channel("subject:N", sort=labels, legend=None)
            return scaled.scale(domain=labels, range=values)

        self.colour = by_subject(alt.Color, [own[label].colour for label in labels])
        self.shape = by_subject(alt.Shape, [own[label].shape for label in labels])
        self.dash = by_subject(alt.StrokeDash, [own[label].dash for label in labels])
        self.picked = alt.param(name="picked", value="")
        self.dim = self._unless_dimmed(1.0, 0.12)

    @staticmethod
    def _unless_dimmed(value: float, dimmed: float) -> Any:
        """A value for what is picked, and for all if nothing is."""
        chosen = "picked === '' || datum.subject === picked"
        return alt.condition(chosen, alt.value(value), alt.value(dimmed))

    def measured(self, metric: Metric) -> bool:
        return any(m.metric == metric.key for m in self.comparison.measurements)

    def headline(self) -> Chart:
        metric = self.comparison.headline
        notes = [
            *(["shaded: the trained length"] if len(self.comparison.test_lengths) > 1 else []),
            *(["bands: 95 % over seeds"] if self.comparison.most_seeds > 1 else []),
            *(
                ["grey: for comparison"]
                if any(r.subject.role != "candidate" for r in self.rows)
                else []
            ),
        ]
        better = f"{'Lower' if metric.lower_is_better else 'Higher'} is better"
        guide = f"{metric.description} {'; '.join([better, *notes])}."
        return self._chart("headline", metric.label, guide, metric)

    def changes(self) -> bool:
        """True if there is a change to draw: nothing is a share of zero."""
        return not self._table(self.comparison.headline, changed=True)[0].empty

    def change(self) -> Chart:
        metric = self.comparison.headline
        worse = "above" if metric.lower_is_better else "below"
        how = "in points of a hundred" if metric.is_share else "as a share of it"
        guide = f"Each run against itself at the training length, {how}: {worse} zero is worse."
        return self._chart("change", "Change from the training length", guide, metric, changed=True)

    def curve(self, metric: Metric, guide: str) -> Chart:
        return self._chart(
            metric.key, metric.label, f"{metric.description} {guide}".strip(), metric
        )

    def speed(self) -> Chart:
        """A row a subject: names need no room of their own on an axis."""
        rows = [row for row in self.rows if row.tokens_per_second]
        data = pd.DataFrame(
            {
                "subject": row.subject.label,
                "speed": row.tokens_per_second,
                "memory": f"{(row.peak_memory_bytes or 0) / 2**20:.0f} MiB",
                "parameters": f"{row.parameters:,}",
            }
            for row in rows
        )
        across = "tokens a second in training"
        names = list(data.sort_values("speed", ascending=False).subject)
        base = alt.Chart(data).encode(
            x=alt.X("speed:Q", title=across, axis=alt.Axis(format="~s", tickCount=4)),
            y=alt.Y("subject:N", title=None, sort=names).axis(
                labelLimit=140, grid=False, labelColor="--ink", domain=False, ticks=False
            ),
            color=self.colour,
            opacity=self.dim,
        )
        tooltip = [
            alt.Tooltip("subject", title="encoding"),
            alt.Tooltip("speed", title="tokens/s", format=",.0f"),
            alt.Tooltip("memory", title="peak memory"),
            alt.Tooltip("parameters"),
        ]
        stems = base.mark_rule(strokeWidth=2).encode(x2=alt.datum(0), strokeDash=self.dash)
        points = base.mark_point(size=60, filled=True, opacity=1).encode(
            shape=self.shape, tooltip=tooltip
        )
        title = "Speed in training"
        series = [
            (row["subject"], [(row["speed"], row["memory"])]) for row in data.to_dict("records")
        ]
        return Chart.of(
            "cost",
            title,
            "Of this machine in this run; only ratios carry over.",
            alt.layer(stems, points).add_params(self.picked),
            text_of(title, (across, "peak memory"), series),
            width=SMALL_WIDTH,
            height=max(SMALL_HEIGHT, round(LINE_HEIGHT * len(names))),
        )

    def _table(self, metric: Metric, *, changed: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Means and intervals by subject and point, and the value of every seed.

        Changes are from the training length: differences of shares, else shares of the base.
        """
        percent = metric.is_share or changed
        form = ".1%" if percent else None
        bounds = bounds_of(metric, changed=changed)
        train = self.comparison.train_length
        labels = {subject.name: subject.label for subject in self.comparison.subjects}
        frame = self.comparison.frame()
        frame = frame[frame.metric == metric.key]
        means, seeds = [], []
        for (subject, x), group in frame.groupby(["subject", "x"], sort=True):
            name = str(subject)
            if changed:
                base = group.seed.map(self.comparison.values(name, metric.key, train))
                change = group.value - base
                group = group.assign(
                    value=change if metric.is_share else change / base.where(base != 0)
                )
            values = [value for value in group.value if math.isfinite(value)]
            point = estimate(values, bounds)
            if point is None:
                continue
            here = {"subject": labels[name], "x": x}
            ends = {"mean": point.mean, "low": point.low, "high": point.high}
            means.append(here | ends | {"shown": point.shown(form), "seeds": point.n})
            seeds += [here | {"mean": value} for value in values if point.n > 1]
        columns = ["subject", "x", "mean", "low", "high", "shown", "seeds"]
        return pd.DataFrame(means, columns=columns), pd.DataFrame(seeds, columns=columns[:3])

    def _chart(
        self, key: str, title: str, guide: str, metric: Metric, *, changed: bool = False
    ) -> Chart:
        """Lines over an axis with bands, points, names, and rules at trivial level and zero."""
        data, seeds = self._table(metric, changed=changed)
        first = key == "headline"
        x, start = self._across(metric, data)
        unit = "change" if changed else metric.unit
        level, name = (0.0, "") if changed else (metric.trivial, metric.trivial_rule)
        if level is not None and (data.empty or level > 1.1 * float(data.high.max())):
            level = None
        y = value_axis(
            [*data.low, *data.high, *seeds["mean"], *([] if level is None else [level])],
            unit,
            percent=metric.is_share or changed,
            signed=changed,
            zero=metric.is_share and not changed,  # of shares, none is left to be guessed
            bounds=bounds_of(metric, changed=changed),
        )
        tooltip = [
            alt.Tooltip("subject", title="encoding"),
            alt.Tooltip("x", title=metric.axis),
            alt.Tooltip("shown", title=unit),
            alt.Tooltip("seeds"),
        ]
        base = alt.Chart(data).encode(x=x, y=y, color=self.colour)
        band = base.mark_area().encode(
            y=of_field(y, "low:Q"),
            y2="high:Q",
            # Not opacity, for which a rasteriser draws each band into a layer of its own.
            fillOpacity=self._unless_dimmed(0.16, 0.02),
        )
        line = base.mark_line(strokeWidth=2.2).encode(strokeDash=self.dash, opacity=self.dim)
        few = len(data) < FEW
        size = (64 if first else 36) if few else 12
        points = base.mark_point(size=size, filled=True).encode(
            shape=self.shape, opacity=self.dim, tooltip=tooltip
        )
        layers: list[Any] = [band, line, points]
        if few and first and not seeds.empty:
            dots = alt.Chart(seeds).mark_circle(size=14, clip=True)
            layers.insert(1, dots.encode(x=x, y=y, color=self.colour, opacity=self.dim))
        trained = self.comparison.train_length
        if level is not None:
            layers = rule(y, level, name) + layers
        if start < trained and metric.key != "training_loss":
            label = "trained" if first else ""
            layers = shade(x, start, trained, label, top=metric.lower_is_better) + layers
        drawn = [row.subject.label for row in self.rows if row.subject.label in set(data.subject)]
        many = len(drawn) > MANY
        narrow = HEIGHT if many else NARROW_HEIGHT
        ends = data.sort_values("x").groupby("subject", sort=False).tail(1)
        if not first:  # names of points on the axis have no room, nor have many
            ends = ends[(ends.x > data.x.min()) & (not many)]
        layers += line_names(
            ends,
            x,
            y,
            height=narrow if first else SMALL_HEIGHT,
            left_of=trained if first and start < trained else -math.inf,
            colour=self.colour,
            opacity=self.dim,
        )
        series = [
            (label, list(zip(own.x, own.shown, strict=True)))
            for label in drawn
            if not (own := data[data.subject == label]).empty
        ]
        return Chart.of(
            key,
            title,
            guide,
            alt.layer(*layers).add_params(self.picked),
            text_of(title, (metric.axis, unit), series),
            width=PICTURE_WIDTH if first else SMALL_WIDTH,
            height=HEIGHT if first else SMALL_HEIGHT,
            narrow=narrow if first else None,
        )

    def _at_lengths(self, data: pd.DataFrame) -> bool:
        return set(data.x) <= set(self.comparison.test_lengths)

    def _across(self, metric: Metric, data: pd.DataFrame) -> tuple[alt.X, float]:
        """The horizontal axis, and where it begins: of test lengths, before the trained one."""
        if not self._at_lengths(data):
            scale = alt.Scale(zero=True, nice=False)
            axis = alt.Axis(tickCount=5, grid=False)
            return alt.X("x:Q", title=metric.axis, axis=axis, scale=scale), 0.0
        trained, last = self.comparison.train_length, max(self.comparison.test_lengths)
        if last == trained:
            scale, low = alt.Scale(domain=[0, 2 * trained]), float(trained)
        elif metric.log_x:
            low = trained * (trained / last) ** (BEFORE / (1 - BEFORE))
            scale = alt.Scale(type="log", base=2, domain=[low, last], nice=False)
        else:
            low = trained - (last - trained) * BEFORE / (1 - BEFORE)
            scale = alt.Scale(domain=[low, last], nice=False, zero=False)
        times = f"format(datum.value / {trained}, '.3~g') + ' ×'"
        axis = alt.Axis(
            values=list(self.comparison.test_lengths),
            labelExpr=f"[format(datum.value, 'd'), {times}]",
            grid=False,
        )
        return alt.X("x:Q", title=metric.axis, axis=axis, scale=scale), low
