"""Blocks: far keys, fine tables, dropout, strides and derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.t5 import T5
from tests.attention.comparing import compare


def close(got: Tensor, expected: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, atol=within, rtol=within, check_dtype=False)


def draw(length: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 8, generator=generator, dtype=torch.float64)
    return q, k, v


def frozen_table(values: Tensor) -> Encoding:
    """A causal T5 table ``[1, 8]`` whose last bucket begins at a distance of 16."""
    score = T5(heads=1, causal=True, buckets=8, max_distance=16).to(values.dtype)
    with torch.no_grad():
        next(score.parameters()).copy_(values.view_as(next(score.parameters())))
    return Encoding(score=score.requires_grad_(False))


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_far_keys_that_matter(backend: str) -> None:
    """One far key outweighs all near ones, though the table takes 290 from its logit.

    Queries and keys of length √150 along one axis: near products are -150, that one is 150.
    """
    table = torch.zeros(8, dtype=torch.float64)
    table[-1] = -290
    q, k, v = draw(64, heads=1)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 150**0.5, -(150**0.5)
    k[..., 0, 0] *= -1
    grid, encoding = Grid.of(Layout.sequence(64), causal=True), frozen_table(table)
    got, expected = (
        attend(q, k, v, grid, encoding, backend=way, scale=1.0) for way in (backend, "reference")
    )
    close(got, expected)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_fine_differences(backend: str) -> None:
    """Table entries that differ by less than half precision can tell."""
    values = 100 + torch.linspace(0, 2, 8)
    q, k, v = (x.bfloat16() for x in draw(40, heads=1))
    grid, encoding = Grid.of(Layout.sequence(40), causal=True), frozen_table(values)
    got = attend(q, k, v, grid, encoding, backend=backend)
    wide = (x.double() for x in (q, k, v))
    close(got, attend(*wide, grid, encoding, backend="reference"), 0.02)


def test_rows_are_dropped_apart() -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in draw(40))
    grid = Grid.of(Layout.sequence(40))
    output = attend(q, k, v, grid, Encoding(), backend="blockwise", dropout=0.5)
    assert (output[0] - output[1]).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_derivatives() -> None:
    q, k, v = draw(20)
    grid = Grid.of(Layout.sequence(20), causal=True)
    found = [
        torch.func.jvp(
            lambda x, way=way: attend(x, k, v, grid, Encoding(), backend=way), (q,), (k,)
        )
        for way in ("blockwise", "reference")
    ]
    close(found[0][1], found[1][1])


def test_far_gradients() -> None:
    tensors, grid = [x.requires_grad_() for x in draw(700)], Grid.of(Layout.sequence(700))
    encoding = Encoding(score=posenc.create("shaw", head_dim=8, max_distance=3).score).double()
    compare(tensors, grid, encoding, "blockwise", lse=False, tolerance=1e-6)
