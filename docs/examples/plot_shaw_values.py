"""
Shaw: values
============

Besides keys, values get a vector by clipped offset: what a token receives tells from
how far away it came. The bars are the lengths of the vectors that are added, for random
tables.
"""

import altair
import torch

import posenc
from posenc import Grid, Layout

torch.manual_seed(0)
shaw = posenc.create("shaw", head_dim=16, max_distance=4)
grid = Grid.of(Layout.sequence(24), causal=True)
weights = torch.eye(24)[None, None]  # each query sees itself alone …
rows = []
for distance in range(12):
    # … or one token farther back
    seen = weights.roll(-distance, dims=-1)[:, :, distance:]
    later = Grid(grid.query.slice(distance, 24), grid.key, causal=True)
    added = shaw.value(seen, later)
    rows.append({"distance": distance, "length": added.norm(dim=-1).mean().item()})
chart = (
    altair.Chart(altair.Data(values=rows))
    .mark_bar()
    .encode(
        x=altair.X(
            "distance:O", title="distance in tokens", axis=altair.Axis(labelAngle=0)
        ),
        y=altair.Y("length:Q", title="length of the added vector"),
    )
)
alt = (
    "Bars of different heights up to distance 4, and of one height beyond: offsets "
    "are clipped."
)
