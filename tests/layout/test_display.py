"""Layouts and grids in a line of text."""

from __future__ import annotations

import pytest
import torch

from posenc import Grid, Layout

LAYOUTS = {
    "sequence": Layout.sequence(5000, 7),
    "packed": Layout.packed([700, 324]),
    "left padded": Layout.padded([3, 0, 9], side="left"),
    "image": Layout.image(14, 14, prefix=1, valid=torch.ones(2, 14, 14, dtype=torch.bool)),
    "times": Layout.at(torch.tensor([0.5, 2.0, 7.25], requires_grad=True)),
    "three axes": Layout.at(torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0))),
    "one": Layout.sequence(1),
    "empty": Layout.sequence(4).slice(2, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_grids(layout: Layout) -> None:
    grid = Grid(layout.slice(0, 3), layout, causal=True, window=9)
    assert repr(grid) == f"Grid(query={grid.query}, key={layout}, causal=True, window=9)"
    assert repr(Grid.of(layout)) == f"Grid.of({layout}, causal=False)"
    for shown in (layout, grid, Grid.of(layout)):
        assert len(repr(shown)) < 300
        assert "tensor(" not in repr(shown)


def test_a_line_says_what_a_layout_has() -> None:
    assert repr(Layout.sequence(5)) == "Layout(length=5, batch=1, axes=1, start=0)"
    assert repr(Layout.padded([2, 3])) == "Layout(length=3, batch=2, axes=1, valid=…)"
    image = Layout.image(2, 3).to("meta")
    assert repr(image) == "Layout(length=6, batch=1, axes=2, extent=(2, 3), device=meta)"
