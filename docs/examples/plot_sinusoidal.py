"""
Sinusoids: token vectors
========================

Each position has a vector of sines and cosines, added to the token's. The products of
two of them depend on the distance of their positions: the diagonals have one colour
each.
"""

import altair
import torch

import posenc
from posenc import Layout

encoding = posenc.create("sinusoidal", dim=64)
vectors = encoding.embed(torch.zeros(1, 40, 64), Layout.sequence(40))[0]
products = vectors @ vectors.T
rows = [
    {"position": i, "other": j, "product": products[i, j].item()}
    for i in range(40)
    for j in range(40)
]
chart = altair.Chart(altair.Data(values=rows)).mark_rect()
every_fifth = altair.Axis(values=list(range(0, 40, 5)), labelAngle=0)
chart = chart.encode(
    x=altair.X("other:O", title="position", axis=every_fifth),
    y=altair.Y("position:O", axis=every_fifth),
    color=altair.Color("product:Q", scale=altair.Scale(scheme="blues")),
)
chart = chart.properties(width=320, height=320)
alt = (
    "A square of 40 by 40 positions, darkest along the diagonal, with stripes "
    "parallel to it."
)
