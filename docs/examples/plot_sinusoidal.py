"""
Sinusoids: token vectors
========================

Each position has a vector of sines and cosines, added to the token's. The products of two of them
depend on the distance of their positions: the diagonals have one colour each.
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
chart = chart.encode(x="other:O", y="position:O", color="product:Q")
alt = "A square of 40 by 40 positions, darkest along the diagonal, with stripes parallel to it."
