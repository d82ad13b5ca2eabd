"""Chart of time and memory by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from posenc.lab.bench.run import PLAIN

PANELS = {
    "both_seconds": ("Time of attention, forward and backward", "milliseconds", 1e3),
    "both_memory": ("Memory beyond its inputs, at the highest point", "megabytes", 1e-6),
}


def draw(rows: Sequence[dict[str, Any]], subtitle: str) -> dict[str, Any] | None:
    """A panel an encoding and quantity, a line a contender, as a Vega-Lite specification.

    None if nothing was measured forward and backward.
    """
    frame = pd.DataFrame(rows)
    frame = frame[(frame.level == "call") & (frame.batch == 1) & (frame.dtype == frame.dtype[0])]
    frame["encoding"] += frame.causal.map({True: ", causal", False: ""})
    charts = [
        _panels(frame.assign(value=factor * frame[name].astype(float)), title, unit)
        for name, (title, unit, factor) in PANELS.items()
        if (frame[name].fillna(0) > 0).any()
    ]
    if not charts:
        return None
    title = alt.TitleParams("Attention with an encoding, and without", subtitle=subtitle)
    spec: dict[str, Any] = alt.vconcat(*charts, title=title, spacing=36).to_dict()
    return spec


def _panels(data: pd.DataFrame, title: str, unit: str) -> Any:
    data = data[data.value > 0][["encoding", "contender", "length", "value"]]
    names = list(dict.fromkeys(data.contender))
    dashes = [[5, 3] if name == PLAIN else [1, 0] for name in names]
    x = alt.X("length:Q", title="tokens", axis=alt.Axis(values=sorted(set(data.length))))
    dash = alt.StrokeDash("contender:N", sort=names, legend=None)
    return (
        alt.Chart(data)
        .mark_line(point=True, strokeWidth=2)
        .encode(
            x=x.scale(type="log", base=2, padding=8),
            y=alt.Y("value:Q", title=unit).scale(type="log"),
            color=alt.Color("contender:N", sort=names, legend=alt.Legend(title=None)),
            strokeDash=dash.scale(domain=names, range=dashes),
        )
        .properties(width=190, height=150)
        .facet(facet=alt.Facet("encoding:N", sort=None, title=None), columns=4)
        .properties(title=title)
    )
