"""Layouts and grids as pytrees: they pass through transforms, and are arguments of programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import posenc
from posenc import Grid, Layout


def test_a_layout_is_rebuilt_from_its_leaves() -> None:
    layouts = [
        Layout.sequence(5, start=3),
        Layout.packed([2, 3]),
        Layout.padded([5, 2]),
        Layout.image(2, 3, prefix=1),
    ]
    for layout in layouts:
        leaves, spec = pytree.tree_flatten(layout)
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        assert (rebuilt.start, rebuilt.extent) == (layout.start, layout.extent)
        for name in ("positions", "order", "document", "valid", "special"):
            assert getattr(rebuilt, name) is getattr(layout, name)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_a_map_reaches_every_tensor_of_a_grid() -> None:
    grid = Grid.of(Layout.packed([2, 3]), causal=True, window=2)
    moved = pytree.tree_map(lambda x: x + 1, grid)
    assert (moved.causal, moved.window) == (True, 2)
    assert moved.key.positions.tolist() == (grid.key.positions + 1).tolist()
    assert moved.query.document is not None


def test_a_layout_is_an_argument_of_an_exported_program() -> None:
    encoding = posenc.create("rope", head_dim=8)

    class Model(nn.Module):
        def forward(self, q: Tensor, layout: Layout) -> Tensor:
            return posenc.attend(q, q, q, Grid.of(layout, causal=True), encoding)

    q = torch.randn(1, 2, 6, 8)
    program = torch.export.export(Model(), (q, Layout.packed([4, 2])))
    other = Layout.packed([1, 5])
    torch.testing.assert_close(program.module()(q, other), Model()(q, other))
