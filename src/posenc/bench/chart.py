"""Charts of time and memory by length."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import pandas as pd

from posenc.bench.contenders import PLAIN
from posenc.bench.results import Reading, Report
from posenc.reporting.palette import COLOURS, CONTROL, LIGHT
from posenc.visualization.pictures import CONFIG

ACROSS = 4
"""Encodings in a row of the chart."""

LEAST_MEGABYTES = 0.1
"""Below this, memory is drawn as this much."""


def draw(report: Report) -> dict[str, Any] | None:
    """Both charts as a Vega-Lite specification; None if nothing was measured forward and backward.

    A panel per encoding, a line per contender, logarithmic axes.
    """
    settings = report.settings
    dtype = settings["dtypes"][0]
    calls = [r for r in report.readings if (r.level, r.dtype, r.batch) == ("call", dtype, 1)]
    bidirectional = {r.encoding for r in calls if not r.causal}
    shown = [r for r in calls if not r.causal or r.encoding not in bidirectional]
    times = _points(shown, {r: 1e3 * r.both_seconds for r in shown if r.both_seconds})
    memory = _points(
        shown,
        {r: max(LEAST_MEGABYTES, r.both_memory / 1e6) for r in shown if r.both_memory is not None},
    )
    drawn = {*times.get("contender", ()), *memory.get("contender", ())}
    names = [name for name in dict.fromkeys(r.contender for r in shown) if name in drawn]
    charts = [
        _panels(data, title, unit, names)
        for data, title, unit in (
            (times, "Time of attention, forward and backward", "milliseconds"),
            (memory, "Memory beyond its inputs, at the highest point", "megabytes"),
        )
        if not data.empty
    ]
    if not charts:
        return None
    sizes = f"{settings['heads']} heads of {settings['head_dim']}, {dtype}"
    title = alt.TitleParams(
        "Attention with an encoding, and without",
        subtitle=[f"{report.device}; {sizes}; PyTorch {report.versions.get('torch', '')}"],
        fontSize=20,
        offset=20,
    )
    spec: dict[str, Any] = alt.vconcat(*charts, title=title, spacing=36).to_dict()
    return spec | {"config": CONFIG}


def _points(readings: list[Reading], values: dict[Reading, float]) -> pd.DataFrame:
    records = [
        {
            "encoding": reading.encoding + (", causal" if reading.causal else ""),
            "contender": reading.contender,
            "length": reading.length,
            "value": values[reading],
        }
        for reading in readings
        if reading in values
    ]
    return pd.DataFrame.from_records(records)


def _panels(data: pd.DataFrame, title: str, unit: str, names: list[str]) -> Any:
    others = iter(COLOURS * (len(names) // len(COLOURS) + 1))
    colours = [LIGHT[CONTROL] if name == PLAIN else next(others) for name in names]
    colour = alt.Color("contender:N", sort=names, legend=alt.Legend(title=None, orient="top"))
    lengths = sorted(set(data.length))
    x = alt.X("length:Q", title="tokens", axis=alt.Axis(values=lengths, labelFlush=False))
    lowest, highest = (math.log10(value) for value in (data.value.min(), data.value.max()))
    tens = [10.0**power for power in range(math.floor(lowest), math.ceil(highest) + 1)]
    y = alt.Y("value:Q", title=unit, axis=alt.Axis(values=tens, format="~g"))
    dash = alt.StrokeDash("contender:N", sort=names, legend=None).scale(
        domain=names, range=[[5, 3] if name == PLAIN else [1, 0] for name in names]
    )
    base = alt.Chart(data).encode(
        x=x.scale(type="log", base=2, padding=8),
        y=y.scale(type="log", domain=[tens[0], tens[-1]]),
        color=colour.scale(domain=names, range=colours),
    )
    line = base.mark_line(strokeWidth=2).encode(strokeDash=dash)
    points = base.mark_point(size=34, filled=True, opacity=1)
    order = list(dict.fromkeys(data.encoding))
    facet = alt.Facet("encoding:N", sort=order, title=None, header=alt.Header(labelFontSize=12))
    return (
        alt.layer(line, points)
        .properties(width=190, height=150)
        .facet(facet=facet, columns=ACROSS)
        .properties(title=title)
    )
