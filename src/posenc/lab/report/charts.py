"""The charts of a report, drawn by Altair from a comparison's records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from posenc.lab.answer import Summary
from posenc.lab.colours import COLOURS
from posenc.lab.results import Comparison, Metric
from posenc.lab.statistics import estimate

__all__ = ["Chart", "draw_charts"]

CONTROL_COLOUR = "#80878f"

DASHES: dict[str, list[int]] = {"candidate": [1, 0], "baseline": [7, 4], "control": [2, 3]}


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Args:
        key: name of its files.
        title: what it shows.
        guide: how to read it, true whatever the results.
        spec: Vega-Lite, with its data, as wide as what holds it.
    """

    key: str
    title: str
    guide: str
    spec: dict[str, Any]


def draw_charts(comparison: Comparison, summary: Summary) -> list[Chart]:
    """All charts that the comparison has the measurements for, the deciding one first."""
    artist = _Artist(comparison, summary)
    charts = []
    if artist.measured(comparison.headline):
        charts.append(artist.headline())
        if len(comparison.test_lengths) > 1 and artist.changes():
            charts.append(artist.change())
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
        if not metric.headline and metric.key != "seen" and artist.measured(metric)
    )
    charts += [artist.curve(metric, guides.get(metric.key, "")) for metric in others]
    if comparison.runs and artist.measured(comparison.headline):
        charts.append(artist.cost())
    return charts


class _Artist:
    """Draws the charts of one comparison, with one colour a subject in all of them."""

    def __init__(self, comparison: Comparison, summary: Summary) -> None:
        self.comparison, self.summary = comparison, summary
        self.rows = summary.rows
        labels = [row.subject.label for row in self.rows]
        colours = iter(COLOURS * (len(labels) // len(COLOURS) + 1))
        by_name = {
            subject.label: CONTROL_COLOUR if subject.role == "control" else next(colours)
            for subject in comparison.subjects
        }
        dashes = [DASHES[row.subject.role] for row in self.rows]
        legend = alt.Legend(
            title=None,
            orient="top",
            symbolType="stroke",
            symbolSize=320,
            columns=4,
            labelLimit=220,
            symbolOpacity=1,
        )
        self.pick = alt.selection_point(fields=["subject"], bind="legend", name="picked")
        self.colour = alt.Color("subject:N", sort=labels, legend=legend).scale(
            domain=labels, range=[by_name[label] for label in labels]
        )
        dots = legend.copy()
        dots.symbolType, dots.symbolSize, dots.symbolStrokeWidth = "circle", 110, 0
        self.dots = self.colour.copy().legend(dots)
        self.dash = alt.StrokeDash("subject:N", sort=labels, legend=legend).scale(
            domain=labels, range=dashes
        )
        self.dim = alt.condition(self.pick, alt.value(1.0), alt.value(0.12))

    def measured(self, metric: Metric) -> bool:
        return any(m.metric == metric.key for m in self.comparison.measurements)

    def headline(self) -> Chart:
        metric = self.comparison.headline
        direction = "lower" if metric.lower_is_better else "higher"
        return self._make(
            "headline",
            metric.label,
            f"{metric.description} The training length is the dashed rule; bands are 95 % "
            f"intervals over seeds; {direction} is better. Click a name to single it out.",
            self._curve(metric, lambda value, base: value, percent=metric.is_share),
        )

    def changes(self) -> bool:
        """Whether there is a change to draw: nothing is a share of zero."""
        return not self._table(self.comparison.headline, self._changed).empty

    def change(self) -> Chart:
        metric = self.comparison.headline
        worse = "above" if metric.lower_is_better else "below"
        how = "in points of a hundred" if metric.is_share else "as a share of it"
        chart = self._curve(metric, self._changed, percent=True)
        return self._make(
            "change",
            "Change from the training length",
            f"The same measurement, each run against itself at the training length, {how}: {worse} "
            "zero is worse. It shows what holds up, whatever the level it started from.",
            chart,
        )

    def curve(self, metric: Metric, guide: str) -> Chart:
        chart = self._curve(metric, lambda value, base: value, percent=metric.is_share)
        return self._make(metric.key, metric.label, f"{metric.description} {guide}".strip(), chart)

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
                "value": row.values[at].mean,
                "memory": f"{(row.peak_memory_bytes or 0) / 2**20:.0f} MiB",
                "parameters": f"{row.parameters:,}",
            }
            for row in self.rows
            if at in row.values and row.tokens_per_second
        )
        points = (
            alt.Chart(data)
            .mark_point(size=130, filled=True)
            .encode(
                x=alt.X("speed:Q", title="tokens a second in training").scale(zero=False),
                y=alt.Y(
                    "value:Q",
                    title=f"{metric.unit} at {at}",
                    axis=alt.Axis(format=".0%") if metric.is_share else alt.Axis(),
                ).scale(zero=False, padding=12),
                color=self.dots,
                opacity=self.dim,
                tooltip=[
                    alt.Tooltip("subject", title="encoding"),
                    alt.Tooltip("speed", title="tokens/s", format=",.0f"),
                    alt.Tooltip(
                        "value", title=metric.unit, format=".1%" if metric.is_share else ".3f"
                    ),
                    alt.Tooltip("memory", title="peak memory"),
                    alt.Tooltip("parameters"),
                ],
            )
            .add_params(self.pick)
        )
        return self._make(
            "cost",
            "What it costs",
            "Speed in training against the result at the longest length tested. Speeds are of "
            "this machine in this run; only their ratios carry over.",
            points,
        )

    def _changed(self, value: float, base: float) -> float:
        """The change from ``base``, of what is no share itself as a share of ``base``."""
        if self.comparison.headline.is_share:
            return value - base
        return value / base - 1 if base else math.nan

    def _table(
        self, metric: Metric, of: Callable[[float, float], float], *, percent: bool = False
    ) -> pd.DataFrame:
        """Mean and interval of ``of(value, value at the training length)`` where defined."""
        train = self.comparison.train_length
        labels = {subject.name: subject.label for subject in self.comparison.subjects}
        found = self.comparison.frame()
        found = found[found.metric == metric.key]
        records = []
        for (subject, x), group in found.groupby(["subject", "x"], sort=True):
            name = str(subject)
            base = self.comparison.values(name, metric.key, train)
            values = [
                of(value, base.get(seed, float("nan")))
                for seed, value in zip(group.seed, group.value, strict=True)
            ]
            point = estimate(value for value in values if math.isfinite(value))
            if point is not None:
                form, fine = (".1%", ".1%") if percent else (".3g", ".2g")
                spread = "" if point.half_width is None else f" ± {point.half_width:{fine}}"
                records.append(
                    {
                        "subject": labels[name],
                        "x": x,
                        "mean": point.mean,
                        "low": point.low,
                        "high": point.high,
                        "shown": f"{point.mean:{form}}{spread}",
                        "seeds": point.n,
                    }
                )
        columns = ["subject", "x", "mean", "low", "high", "shown", "seeds"]
        return pd.DataFrame(records, columns=columns)

    def _curve(
        self, metric: Metric, of: Callable[[float, float], float], *, percent: bool = False
    ) -> Any:
        data = self._table(metric, of, percent=percent)
        lengths = list(self.comparison.test_lengths)
        at_lengths = set(data.x) <= set(lengths)
        axis = alt.Axis(values=lengths) if at_lengths else alt.Axis(tickCount=8)
        scale = (
            alt.Scale(type="log", base=2)
            if metric.log_x
            else alt.Scale(zero=not at_lengths, nice=False)
        )
        x = alt.X("x:Q", title=metric.axis, axis=axis, scale=scale)
        unit = "change" if of(2.0, 1.0) != 2.0 else metric.unit
        whole = metric.is_share and unit != "change"  # of shares, none is left to be guessed
        value_axis = (
            alt.Axis(format="+.0%" if unit == "change" else ".0%") if percent else alt.Axis()
        )
        tooltip = [
            alt.Tooltip("subject", title="encoding"),
            alt.Tooltip("x", title=metric.axis),
            alt.Tooltip("shown", title=unit),
            alt.Tooltip("seeds"),
        ]
        base = alt.Chart(data)
        band = base.mark_area().encode(
            x=x,
            y=alt.Y("low:Q").scale(zero=whole),
            y2="high:Q",
            color=self.colour,
            opacity=alt.condition(self.pick, alt.value(0.16), alt.value(0.02)),
        )
        line = base.mark_line(strokeWidth=2.2).encode(
            x=x,
            y=alt.Y("mean:Q", title=unit, axis=value_axis).scale(zero=whole),
            color=self.colour,
            strokeDash=self.dash,
            opacity=self.dim,
        )
        points = base.mark_point(size=64 if len(data) < 90 else 24, filled=True).encode(
            x=x, y="mean:Q", color=self.colour, opacity=self.dim, tooltip=tooltip
        )
        layers: list[Any] = [band, line, points.add_params(self.pick)]
        if metric.key != "training_loss":
            layers = self._rule("x", self.comparison.train_length, "trained") + layers
        level, name = (0.0, "") if unit == "change" else (metric.chance, "chance")
        if level is not None and not data.empty and level <= 1.1 * float(data.high.max()):
            layers = self._rule("y", level, name) + layers
        return alt.layer(*layers)

    def _rule(self, channel: str, at: float, label: str) -> list[Any]:
        """A dashed rule at a value of ``channel`` ("x" or "y"), labelled at its end."""
        base = alt.Chart(pd.DataFrame({channel: [at], "label": [label]})).encode(
            **{channel: f"{channel}:Q"}
        )
        rule = base.mark_rule(strokeDash=[5, 4], color=CONTROL_COLOUR, strokeWidth=1)
        if channel == "x":
            # Where lines do not begin: what is better lower comes from below.
            top = self.comparison.headline.lower_is_better
            text = base.mark_text(
                align="left",
                baseline="top" if top else "bottom",
                dx=5,
                dy=3 if top else -12,
                color=CONTROL_COLOUR,
            )
            return [rule, text.encode(y=alt.value(0 if top else "height"), text="label:N")]
        text = base.mark_text(align="right", baseline="bottom", dy=-3, color=CONTROL_COLOUR)
        return [rule, text.encode(x=alt.value("width"), text="label:N")]

    def _make(self, key: str, title: str, guide: str, chart: Any) -> Chart:
        spec = chart.properties(width="container", height=320).to_dict()
        spec.pop("config", None)
        return Chart(key, title, guide, spec)
