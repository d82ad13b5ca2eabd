"""Charts of a study's report, by Altair."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import altair as alt
import pandas as pd

from posenc.evaluation.results import Study, StudyMetric, StudyReading
from posenc.visualization.axes import legend, rule, value_axis
from posenc.visualization.bounds import Bounds
from posenc.visualization.charts import Chart, text_of
from posenc.visualization.colours import CONTROL, SERIES, SHAPES

MOST = 7
"""Number of distinguishable colours."""

Points = Callable[[StudyReading], Iterable[tuple[float, float]]]


def draw_charts(study: Study) -> list[Chart]:
    """All charts, the deciding one first."""
    artist = _Artist(study)
    across = f"{'context' if study.causal else 'text'} length ({study.unit}s)"
    if study.unit == "pixel":
        across = f"size (pixels{', the longer side' if study.labels else ' a side'})"
    charts = []
    for tuned in (False, True) if study.tuned else (False,):
        end, when = ("-tuned", " after fine-tuning") if tuned else ("", " without training")
        when = when if study.tuned else ""
        for metric in study.metrics:
            if metric.title:
                charts.append(
                    artist.draw(
                        f"{metric.key}{end}",
                        f"{metric.title}{when}",
                        metric.guide,
                        lambda reading, metric=metric: reading.of(metric).items(),  # type: ignore[misc]
                        (across, metric),
                        tuned=tuned,
                        by_length=True,
                    )
                )
            if metric.key == "loss":
                charts.append(
                    artist.draw(
                        f"position{end}",
                        f"Loss by position{when}",
                        f"In contexts of {study.goal}, the same {study.unit}s at every position. A "
                        "line that jumps at the dashed rule is misled by positions it was not "
                        "trained at; one that goes on falling uses the farther context.",
                        lambda reading: reading.by_position,
                        (f"position ({study.unit}s)", metric),
                        tuned=tuned,
                    )
                )
    return charts


class _Artist:
    """Draws charts with one colour per method, grey for all but the best."""

    def __init__(self, study: Study) -> None:
        self.study = study
        keys = [method.key for method, _ in study.ranked()]
        baselines = [method.key for method in study.findings if method.role == "baseline"]
        ranked = [method.key for method, _ in study.ranked(tuned=study.tuned)]
        ahead = [key for key in [study.chosen, *ranked, *keys] if key and key not in baselines]
        shown = list(dict.fromkeys(ahead))[:MOST]
        colours = dict(zip(shown, SERIES, strict=False))
        self.named = [*baselines, *reversed(shown)]  # the last is drawn on top
        self.grey = len(keys) - len(self.named)
        shapes = dict(zip([*shown, *baselines], SHAPES * 2, strict=False))
        listed = legend(260, values=[*shown, *baselines])
        self.pick = alt.selection_point(fields=["method"], bind="legend", name="picked")
        self.colour = alt.Color("method:N", sort=self.named, legend=listed).scale(
            domain=self.named, range=[colours.get(key, CONTROL) for key in self.named]
        )
        self.dash = alt.StrokeDash("method:N", sort=self.named, legend=listed).scale(
            domain=self.named,
            range=[
                ([2, 3] if key == "direct" else [7, 4]) if key in baselines else [1, 0]
                for key in self.named
            ],
        )
        self.shape = alt.Shape("method:N", sort=self.named, legend=listed).scale(
            domain=self.named, range=[shapes[key] for key in self.named]
        )
        self.dim = alt.condition(self.pick, alt.value(1.0), alt.value(0.1))

    def draw(
        self,
        key: str,
        title: str,
        guide: str,
        points: Points,
        axes: tuple[str, StudyMetric],
        *,
        tuned: bool,
        by_length: bool = False,
    ) -> Chart:
        readings = {method.key: reading for method, reading in self.study.ranked(tuned=tuned)}
        across, metric = axes
        up, percent, form = metric.axis, metric.percent, ".1%" if metric.percent else ".3f"

        def table(keys: Iterable[str]) -> pd.DataFrame:
            rows = [
                {"method": key, "x": x, "mean": y}
                for key in keys
                if key in readings
                for x, y in points(readings[key])
            ]
            return pd.DataFrame(rows, columns=["method", "x", "mean"])

        if self.grey:
            guide += (
                f" Coloured: the {MOST} best at {self.study.goal} and what is "
                f"written; grey: the other {self.grey}, named when pointed at."
            )
        axis = alt.Axis(values=list(self.study.lengths)) if by_length else alt.Axis(tickCount=8)
        scale = alt.Scale(type="log", base=2) if by_length else alt.Scale(zero=True, nice=False)
        x = alt.X("x:Q", title=across, axis=axis, scale=scale)
        y = value_axis(
            [0.0, 1.0] if percent else table(readings)["mean"],
            up,
            percent=percent,
            bounds=Bounds(0.0, 1.0) if percent else Bounds(0.0),
        )
        tooltip = [
            alt.Tooltip("method:N"),
            alt.Tooltip("x:Q", title=across),
            alt.Tooltip("mean:Q", title=up, format=form),
        ]
        others = [key for key in readings if key not in self.named]
        rest = alt.Chart(table(others)).encode(x=x, y=y, detail="method:N", opacity=self.dim)
        named = alt.Chart(table(self.named)).encode(x=x, y=y, color=self.colour, opacity=self.dim)
        grey = rest.mark_point(size=26, filled=True, color=CONTROL)
        layers: list[Any] = [
            *rule(x, self.study.length, "trained", top=metric.lower),
            *([rest.mark_line(strokeWidth=1, color=CONTROL)] if others else []),
            *([grey.encode(tooltip=tooltip)] if others else []),
            named.mark_line(strokeWidth=2.4).encode(strokeDash=self.dash),
            named.mark_point(size=72 if by_length else 24, filled=True)
            .encode(tooltip=tooltip, shape=self.shape)
            .add_params(self.pick),
        ]
        series = [
            (name, [(at, f"{value:{form}}") for at, value in points(reading)])
            for name, reading in readings.items()
        ]
        text = text_of(title, (across, up), series)
        return Chart.of(key, title, guide, alt.layer(*layers), text)
