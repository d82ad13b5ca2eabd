"""
ALiBi's bias by distance
========================

Every head subtracts its slope times the distance.
"""

import altair

import posenc
from posenc import Grid, Layout

encoding = posenc.create("alibi", heads=4)
bias = encoding.bias(Grid.of(Layout.sequence(64), causal=True))[0, :, -1]
rows = [
    {"head": head, "distance": 63 - key, "bias": float(bias[head, key])}
    for head in range(4)
    for key in range(64)
]
chart = altair.Chart(altair.Data(values=rows)).mark_line()
chart = chart.encode(
    x=altair.X("distance:Q", title="distance in tokens"),
    y=altair.Y("bias:Q", title="added to the logit"),
    color="head:N",
)
alt = "Straight lines that fall with the distance, one slope a head."
