"""The charts of a study's report, drawn by Altair."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import altair as alt
import pandas as pd

from posenc.evaluation.results import Metric, Reading, Study
from posenc.visualization.axes import Bounds, value_axis
from posenc.visualization.charts import Chart, text_of
from posenc.visualization.colours import COLOURS, CONTROL_COLOUR, SHAPES

__all__ = ["draw_charts"]

MOST = 7
"""Methods with a colour of their own: more cannot be told apart."""

REST_COLOUR = "#98a1ab"

Points = Callable[[Reading], Iterable[tuple[float, float]]]


def draw_charts(study: Study) -> list[Chart]:
    """All charts, the deciding one first."""
    artist = _Artist(study)
    charts = []
    for tuned in (False, True) if study.tuned else (False,):
        end = "-tuned" if tuned else ""
        when = ""
        if study.tuned:
            when = " after fine-tuning" if tuned else " without training"
        for metric in study.metrics:
            if metric.title:
                charts.append(
                    artist.draw(
                        f"{metric.key}{end}",
                        f"{metric.title}{when}",
                        metric.guide,
                        partial(_by_length, metric),
                        (_across(study), metric.axis),
                        tuned=tuned,
                        log=True,
                        percent=metric.percent,
                        lower=metric.lower,
                    )
                )
            if metric.key == "loss":
                charts.append(_by_position(artist, end, when, metric, tuned=tuned))
    return charts


def _by_length(metric: Metric, reading: Reading) -> Iterable[tuple[float, float]]:
    return reading.of(metric).items()


def _by_position(artist: _Artist, end: str, when: str, metric: Metric, *, tuned: bool) -> Chart:
    study = artist.study
    return artist.draw(
        f"position{end}",
        f"Loss by position{when}",
        f"In contexts of {study.goal}, the same {study.unit}s at every position. A line "
        "that jumps at the dashed rule is misled by positions it was not trained at; one "
        "that goes on falling uses the farther context.",
        lambda reading: reading.by_position,
        (f"position ({study.unit}s)", metric.axis),
        tuned=tuned,
    )


def _across(study: Study) -> str:
    if study.unit == "pixel":
        return "size (pixels, the longer side)" if study.labels else "size (pixels a side)"
    return f"{'context' if study.causal else 'text'} length ({study.unit}s)"


class _Artist:
    """One colour a method in all charts; grey for those that are not among the best."""

    def __init__(self, study: Study) -> None:
        self.study = study
        keys = [each.key for each, _ in study.ranked()]
        baselines = [each.key for each in study.findings if each.role == "baseline"]
        ranked = [each.key for each, _ in study.ranked(tuned=study.tuned)]
        ahead = [key for key in [study.chosen, *ranked, *keys] if key and key not in baselines]
        shown = list(dict.fromkeys(ahead))[:MOST]
        colours = dict(zip(shown, COLOURS, strict=False))
        self.named = [*baselines, *reversed(shown)]  # what is drawn last lies on top
        self.grey = len(keys) - len(self.named)
        shapes = dict(zip([*shown, *baselines], SHAPES * 2, strict=False))
        legend = alt.Legend(
            title=None,
            orient="top",
            symbolSize=90,
            symbolOpacity=1,
            symbolStrokeWidth=0,
            columns=4,
            labelLimit=260,
            values=[*shown, *baselines],
        )
        self.pick = alt.selection_point(fields=["method"], bind="legend", name="picked")
        self.colour = alt.Color("method:N", sort=self.named, legend=legend).scale(
            domain=self.named, range=[colours.get(key, CONTROL_COLOUR) for key in self.named]
        )
        self.dash = alt.StrokeDash("method:N", sort=self.named, legend=legend).scale(
            domain=self.named,
            range=[
                ([2, 3] if key == "direct" else [7, 4]) if key in baselines else [1, 0]
                for key in self.named
            ],
        )
        self.shape = alt.Shape("method:N", sort=self.named, legend=legend).scale(
            domain=self.named, range=[shapes[key] for key in self.named]
        )
        self.dim = alt.condition(self.pick, alt.value(1.0), alt.value(0.1))

    def draw(
        self,
        key: str,
        title: str,
        guide: str,
        points: Points,
        axes: tuple[str, str],
        *,
        tuned: bool,
        log: bool = False,
        percent: bool = False,
        lower: bool = True,
    ) -> Chart:
        found = {each.key: reading for each, reading in self.study.ranked(tuned=tuned)}

        def table(keys: Iterable[str]) -> pd.DataFrame:
            rows = [
                {"method": key, "x": x, "mean": y}
                for key in keys
                if key in found
                for x, y in points(found[key])
            ]
            return pd.DataFrame(rows, columns=["method", "x", "mean"])

        if self.grey:
            guide += (
                f" Coloured: the {MOST} best at {self.study.goal} and what is "
                f"written; grey: the other {self.grey}, named when pointed at."
            )
        across, up = axes
        axis = alt.Axis(values=list(self.study.lengths)) if log else alt.Axis(tickCount=8)
        scale = alt.Scale(type="log", base=2) if log else alt.Scale(zero=True, nice=False)
        x = alt.X("x:Q", title=across, axis=axis, scale=scale)
        y = value_axis(
            [0.0, 1.0] if percent else table(found)["mean"],
            up,
            percent=percent,
            bounds=Bounds(0.0, 1.0) if percent else Bounds(0.0),
        )
        tooltip = [
            alt.Tooltip("method:N"),
            alt.Tooltip("x:Q", title=across),
            alt.Tooltip("mean:Q", title=up, format=".1%" if percent else ".3f"),
        ]
        others = [key for key in found if key not in self.named]
        rest = alt.Chart(table(others)).encode(x=x, y=y, detail="method:N", opacity=self.dim)
        named = alt.Chart(table(self.named)).encode(x=x, y=y, color=self.colour, opacity=self.dim)
        grey = rest.mark_point(size=26, filled=True, color=REST_COLOUR)
        layers: list[Any] = [
            *self._rule(top=lower),
            *([rest.mark_line(strokeWidth=1, color=REST_COLOUR)] if others else []),
            *([grey.encode(tooltip=tooltip)] if others else []),
            named.mark_line(strokeWidth=2.4).encode(strokeDash=self.dash),
            named.mark_point(size=72 if log else 24, filled=True)
            .encode(tooltip=tooltip, shape=self.shape)
            .add_params(self.pick),
        ]
        form = ".1%" if percent else ".3f"
        series = [
            (name, [(at, f"{value:{form}}") for at, value in points(reading)])
            for name, reading in found.items()
        ]
        text = text_of(title, axes, series)
        chart = alt.layer(*layers).properties(width="container", height=320, description=text)
        spec = chart.to_dict()
        spec.pop("config", None)
        return Chart(key, title, guide, spec, text)

    def _rule(self, *, top: bool) -> list[Any]:
        """The trained length, labelled where lines do not begin."""
        base = alt.Chart(pd.DataFrame({"x": [self.study.length], "label": ["trained"]}))
        base = base.encode(x="x:Q")
        text = base.mark_text(
            align="left",
            baseline="top" if top else "bottom",
            dx=5,
            dy=3 if top else -12,
            color=CONTROL_COLOUR,
        )
        return [
            base.mark_rule(strokeDash=[5, 4], color=CONTROL_COLOUR, strokeWidth=1),
            text.encode(y=alt.value(0 if top else "height"), text="label:N"),
        ]
