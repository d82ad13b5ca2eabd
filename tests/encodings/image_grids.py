"""Awkward images that every method on two axes is tried on, and rotation by loops."""

from __future__ import annotations

import cmath
from collections.abc import Callable

import torch
from torch import Tensor

from posenc import Grid, Layout

MASK = torch.tensor([[[True, True, False], [True, True, False]]])
ROWS = torch.tensor([[[0.0, 1.0], [2.5, 0.25]], [[3.0, -4.0], [700.0, 900.0]]])

IMAGES = {
    "wide": Grid.of(Layout.image(2, 5)),
    "tall": Grid.of(Layout.image(4, 1)),
    "one cell": Grid.of(Layout.image(1, 1)),
    "class token": Grid.of(Layout.image(3, 2, prefix=2)),
    "masked": Grid.of(Layout.image(2, 3, valid=MASK)),
    "raster order": Grid.of(Layout.image(2, 3), causal=True),
    "pooled keys": Grid(Layout.image(2, 4), Layout.image(2, 2)),
    "fractions, own positions a row": Grid.of(Layout.at(ROWS)),
}


def rotate_axes_by_loops(
    x: Tensor,
    layout: Layout,
    angle: Callable[[int, int, list[float]], float],
    *,
    adjacent: bool = False,
) -> Tensor:
    """Every pair of a head times a complex number; ``angle(head, pair, position)`` in radians."""
    x = x.double().clone()
    pairs = x.shape[-1] // 2
    for b in range(x.shape[0]):
        for i in range(x.shape[2]):
            if layout.special is not None and layout.special[0, i]:
                continue
            at = layout.positions[min(b, layout.positions.shape[0] - 1), i].tolist()
            for h in range(x.shape[1]):
                for t in range(pairs):
                    places = (2 * t, 2 * t + 1) if adjacent else (t, t + pairs)
                    first, second = (x[b, h, i, place].item() for place in places)
                    turned = complex(first, second) * cmath.exp(1j * angle(h, t, at))
                    x[b, h, i, places[0]], x[b, h, i, places[1]] = turned.real, turned.imag
    return x
