"""
RoPE: queries and keys
======================

The product of a rotated query and a rotated key depends on their distance only. For two
equal vectors it falls as the distance grows, in waves: slow pairs of features fall
slowly.
"""

import altair
import torch

import posenc
from posenc import Grid, Layout

rows = []
for base in (100.0, 10_000.0, 500_000.0):
    rope = posenc.create("rope", head_dim=64, base=base)
    vectors = torch.ones(1, 1, 256, 64)
    q, k = rope.query_key(vectors, vectors, Grid.of(Layout.sequence(256)))
    products = (q[0, 0, 0] * k[0, 0]).sum(-1) / 64
    rows += [
        {"base": f"{base:,.0f}", "distance": distance, "product": product}
        for distance, product in enumerate(products.tolist())
    ]
chart = altair.Chart(altair.Data(values=rows)).mark_line()
chart = chart.encode(
    x=altair.X("distance:Q", title="distance in tokens"),
    y=altair.Y("product:Q", title="product, relative to distance 0"),
    color=altair.Color("base:N", sort=None),
)
alt = (
    "Three curves that fall from 1 with the distance, the larger the base the more "
    "slowly."
)
