"""
Stretching: before and after
============================

A model trained at 64 tokens meets angles beyond its trained ones at 256. Interpolation
slows all pairs of features down; YaRN only those that are slow, so that near tokens
stay apart as before.
"""

import altair

import posenc
from posenc.extension import extend

rope = posenc.create("rope", head_dim=32)
methods = {
    "trained": rope,
    "interpolate": extend(rope, "interpolate", factor=4),
    "ntk": extend(rope, "ntk", factor=4),
    "yarn": extend(rope, "yarn@alpha=0.5@beta=4@truncate=false", factor=4, length=64),
}
rows = [
    {"method": name, "pair": pair, "slower": divisor}
    for name, encoding in methods.items()
    for pair, divisor in enumerate(encoding.query_key.divisors or [1.0] * 16)
]
chart = altair.Chart(altair.Data(values=rows)).mark_line(point=True)
chart = chart.encode(
    x=altair.X(
        "pair:O",
        title="pair of features, the fastest first",
        axis=altair.Axis(labelAngle=0),
    ),
    y=altair.Y("slower:Q", title="times slower than trained"),
    color="method:N",
)
alt = (
    "How many times slower each pair turns: 1 as trained, 4 by interpolation, in "
    "between by others."
)
