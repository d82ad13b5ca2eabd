"""The charts of a report, drawn by Altair from a comparison's records."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import altair as alt
import pandas as pd

from posenc.experiments.bounds import bounds_of, interval
from posenc.experiments.results import Comparison, Metric
from posenc.experiments.statistics import estimate
from posenc.experiments.summary import Summary
from posenc.visualization.axes import legend, of_field, rule, value_axis
from posenc.visualization.charts import Chart, text_of
from posenc.visualization.colours import COLOURS, CONTROL_COLOUR, SHAPES

FEW = 90
"""Points up to which a chart has large ones, and a dot a seed."""

DASHES: dict[str, list[int]] = {"candidate": [1, 0], "baseline": [7, 4], "control": [2, 3]}


def draw_charts(comparison: Comparison, summary: Summary) -> list[Chart]:
    """All charts that the comparison has the measurements for, the deciding one first."""
    drawing = _ComparisonCharts(comparison, summary)
    charts = []
    if drawing.measured(comparison.headline):
        charts.append(drawing.headline())
        if len(comparison.test_lengths) > 1 and drawing.changes():
            charts.append(drawing.change())
    guides = {
        "loss_by_position": "Each point is the mean over a stretch of the context. Where a line "
        "falls, the model uses the further context; where it jumps at the dashed rule, positions "
        "it was not trained at mislead it.",
        "recall": "Can the model still find something far back? A flat loss alone does not show "
        "it: a model that forgets everything older than the training length has one too.",
        "training_loss": "Lines that still fall at the end would gain from more steps.",
    }
    others = (
        metric
        for metric in comparison.metrics
        if not metric.headline and metric.key != "seen" and drawing.measured(metric)
    )
    charts += [drawing.curve(metric, guides.get(metric.key, "")) for metric in others]
    if comparison.runs and drawing.measured(comparison.headline):
        charts.append(drawing.cost())
    return charts


class _ComparisonCharts:
    """Draws the charts of one comparison, with one colour a subject in all of them."""

    def __init__(self, comparison: Comparison, summary: Summary) -> None:
        self.comparison, self.rows = comparison, summary.rows
        labels = [row.subject.label for row in self.rows]
        subjects = comparison.subjects
        coloured = [subject.label for subject in subjects if subject.role != "control"]
        colours = dict(zip(coloured, cycle(COLOURS), strict=False))
        shapes = dict(zip((subject.label for subject in subjects), cycle(SHAPES), strict=False))

        def by_subject(channel: Any, values: list[Any]) -> Any:
            scaled = channel("subject:N", sort=labels, legend=legend(220))
            return scaled.scale(domain=labels, range=values)

        self.pick = alt.selection_point(fields=["subject"], bind="legend", name="picked")
        self.colour = by_subject(alt.Color, [colours.get(n, CONTROL_COLOUR) for n in labels])
        self.shape = by_subject(alt.Shape, [shapes[n] for n in labels])
        self.dash = by_subject(alt.StrokeDash, [DASHES[row.subject.role] for row in self.rows])
        self.dim = alt.condition(self.pick, alt.value(1.0), alt.value(0.12))

    def measured(self, metric: Metric) -> bool:
        return any(m.metric == metric.key for m in self.comparison.measurements)

    def headline(self) -> Chart:
        metric = self.comparison.headline
        direction = "lower" if metric.lower_is_better else "higher"
        return Chart.of(
            "headline",
            metric.label,
            f"{metric.description} The training length is the dashed rule; bands are 95 % "
            f"intervals over seeds, dots the seeds; {direction} is better. Baselines are dashed, "
            "controls dotted. Click a name to single it out.",
            *self._curve(metric, metric.label),
        )

    def changes(self) -> bool:
        """True if there is a change to draw: nothing is a share of zero."""
        return not self._table(self.comparison.headline, changed=True)[0].empty

    def change(self) -> Chart:
        metric = self.comparison.headline
        worse = "above" if metric.lower_is_better else "below"
        how = "in points of a hundred" if metric.is_share else "as a share of it"
        title = "Change from the training length"
        return Chart.of(
            "change",
            title,
            f"The same measurement, each run against itself at the training length, {how}: {worse} "
            "zero is worse. It shows what holds up, whatever the level it started from.",
            *self._curve(metric, title, changed=True),
        )

    def curve(self, metric: Metric, guide: str) -> Chart:
        guide = f"{metric.description} {guide}".strip()
        return Chart.of(metric.key, metric.label, guide, *self._curve(metric, metric.label))

    def cost(self) -> Chart:
        metric, longest = self.comparison.headline, self.comparison.test_lengths[-1]
        at = max(
            (x for row in self.rows for x in row.values if x <= longest),
            default=self.comparison.train_length,
        )
        data = pd.DataFrame(
            {
                "subject": row.subject.label,
                "speed": row.tokens_per_second,
                "mean": row.values[at].mean,
                "memory": f"{(row.peak_memory_bytes or 0) / 2**20:.0f} MiB",
                "parameters": f"{row.parameters:,}",
            }
            for row in self.rows
            if at in row.values and row.tokens_per_second
        )
        form = ".1%" if metric.is_share else ".3f"
        title = f"{metric.unit} at {at}"
        up = value_axis(data["mean"], title, percent=metric.is_share, bounds=bounds_of(metric))
        across = "tokens a second in training"
        base = alt.Chart(data).encode(
            x=alt.X("speed:Q", title=across, axis=alt.Axis(format="~s", tickCount=6)).scale(
                zero=False, padding=24
            ),
            y=up,
            opacity=self.dim,
        )
        points = base.mark_point(size=130, filled=True).encode(
            color=self.colour,
            shape=self.shape,
            tooltip=[
                alt.Tooltip("subject", title="encoding"),
                alt.Tooltip("speed", title="tokens/s", format=",.0f"),
                alt.Tooltip("mean", title=metric.unit, format=form),
                alt.Tooltip("memory", title="peak memory"),
                alt.Tooltip("parameters"),
            ],
        )
        names = base.mark_text(dy=-13, color=CONTROL_COLOUR).encode(text="subject:N")
        return Chart.of(
            "cost",
            "What it costs",
            "Speed in training against the result at the longest length tested. Speeds are of "
            "this machine in this run; only their ratios carry over.",
            alt.layer(points.add_params(self.pick), names),
            text_of(
                "What it costs",
                (across, title),
                [
                    (row["subject"], [(row["speed"], f"{row['mean']:{form}}")])
                    for row in data.to_dict("records")
                ],
            ),
        )

    def _table(self, metric: Metric, *, changed: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Means and intervals by subject and point, and the value of every seed.

        Changes are from the training length: differences of shares, else shares of the base.
        """
        percent = metric.is_share or changed
        form, fine = (".1%", ".1%") if percent else (".3g", ".2g")
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
            point = estimate(values)
            if point is None:
                continue
            here = {"subject": labels[name], "x": x}
            shown = f"{point.mean:{form}} {interval(point, bounds, form, fine)}".strip()
            low, high = bounds.clip(point.low), bounds.clip(point.high)
            ends = {"mean": point.mean, "low": low, "high": high}
            means.append(here | ends | {"shown": shown, "seeds": point.n})
            seeds += [here | {"mean": value} for value in values if point.n > 1]
        columns = ["subject", "x", "mean", "low", "high", "shown", "seeds"]
        return pd.DataFrame(means, columns=columns), pd.DataFrame(seeds, columns=columns[:3])

    def _curve(self, metric: Metric, title: str, *, changed: bool = False) -> tuple[Any, str]:
        """Lines over an axis with bands, points, and rules at chance and training length."""
        data, seeds = self._table(metric, changed=changed)
        lengths = list(self.comparison.test_lengths)
        at_lengths = set(data.x) <= set(lengths)
        axis = alt.Axis(values=lengths) if at_lengths else alt.Axis(tickCount=8)
        scale = (
            alt.Scale(type="log", base=2)
            if metric.log_x
            else alt.Scale(zero=not at_lengths, nice=False)
        )
        x = alt.X("x:Q", title=metric.axis, axis=axis, scale=scale)
        unit = "change" if changed else metric.unit
        level, name = (0.0, "") if changed else (metric.chance, "chance")
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
            fillOpacity=alt.condition(self.pick, alt.value(0.16), alt.value(0.02)),
        )
        line = base.mark_line(strokeWidth=2.2).encode(strokeDash=self.dash, opacity=self.dim)
        few = len(data) < FEW
        points = base.mark_point(size=80 if few else 24, filled=True).encode(
            shape=self.shape, opacity=self.dim, tooltip=tooltip
        )
        layers: list[Any] = [band, line, points.add_params(self.pick)]
        if few and not seeds.empty:
            dots = alt.Chart(seeds).mark_circle(size=14, clip=True)
            layers.insert(1, dots.encode(x=x, y=y, color=self.colour, opacity=self.dim))
        if metric.key != "training_loss":
            trained = self.comparison.train_length
            # Labelled where lines do not begin: what is better lower comes from below.
            layers = (
                rule(x, trained, "trained", top=self.comparison.headline.lower_is_better) + layers
            )
        if level is not None:
            layers = rule(y, level, name) + layers
        series = [
            (label, list(zip(own.x, own.shown, strict=True)))
            for label in (row.subject.label for row in self.rows)
            if not (own := data[data.subject == label]).empty
        ]
        return alt.layer(*layers), text_of(title, (metric.axis, unit), series)
