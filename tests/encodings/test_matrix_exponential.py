"""Exponentials of sums of two matrices against ``torch.matrix_exp`` and angles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc.encodings.common import matrix_rotation
from posenc.encodings.common.matrix_rotation import exponentials

DOUBLE = torch.float64
ROUNDING = 2**-52


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast form for few matrices too, and never the definition."""
    monkeypatch.setattr(matrix_rotation, "FEWEST", 1)
    monkeypatch.setattr(matrix_rotation, "FEWEST_MATRICES", 1)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("computed by the definition")

    monkeypatch.setattr(matrix_rotation, "_by_definition", refuse)


def matrices(block: int, *, heads: int = 2, blocks: int = 3) -> Tensor:
    upper = torch.rand(2, heads, blocks, block, block, dtype=DOUBLE).triu(1) * 2 * math.pi
    return upper - upper.mT


def places(count: int = 20, *, rows: int = 1, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, count, 2, dtype=DOUBLE) * scale


def definition(positions: Tensor, skew: Tensor) -> Tensor:
    """``[b, H, L, N, B, B]``, a position at a time."""
    exponents = [(p[:, None, None, None, None] * skew).sum(0) for p in positions.flatten(0, 1)]
    found = torch.matrix_exp(torch.stack(exponents))
    return found.view(*positions.shape[:2], *skew.shape[1:]).transpose(1, 2)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("block", [2, 3, 8, 16])
@pytest.mark.parametrize("scale", [0.0, 1e-9, 0.01, 1.0, 30.0, 1e4])
def test_equals_matrix_exp(block: int, scale: float) -> None:
    positions, skew = places(rows=2, scale=scale), matrices(block)
    got, expected = exponentials(positions, skew, dtype=DOUBLE), definition(positions, skew)
    radians = 2 * math.pi * block * scale
    torch.testing.assert_close(got, expected, rtol=0.0, atol=16 * ROUNDING * (1 + radians))


@pytest.mark.usefixtures("fast")
def test_far_rotations_of_two_features_are_those_of_angles() -> None:
    positions = torch.tensor([[[2.0**30 + 1, 3.0], [5.0, -(2.0**40)], [0.25, 0.5]]], dtype=DOUBLE)
    skew = torch.zeros(2, 1, 1, 2, 2, dtype=DOUBLE)
    skew[0, ..., 0, 1], skew[0, ..., 1, 0] = -0.75, 0.75
    skew[1, ..., 0, 1], skew[1, ..., 1, 0] = -1.5, 1.5
    angles = positions @ torch.tensor([0.75, 1.5], dtype=DOUBLE)
    got = exponentials(positions, skew, dtype=DOUBLE)[0, 0, :, 0]
    for rotation, angle in zip(got, angles[0], strict=True):
        expected = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        bound = 2 * ROUNDING * (1 + angle.abs().item())
        torch.testing.assert_close(rotation, expected, rtol=0.0, atol=bound)


@pytest.mark.usefixtures("fast")
def test_zeros_do_not_rotate() -> None:
    positions = places()
    positions[0, 3] = 0.0
    skew = matrices(8)
    skew[:, 1, 2] = 0.0
    got = exponentials(positions, skew, dtype=torch.float32)
    eye = torch.eye(8)
    assert torch.equal(got[0, :, 3], eye.expand_as(got[0, :, 3]))
    assert torch.equal(got[0, 1, :, 2], eye.expand_as(got[0, 1, :, 2]))
    assert not torch.allclose(got[0, 0, 4, 0], eye, atol=0.1)
    assert got.dtype == torch.float32


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("outlier", [1e9, math.inf, math.nan])
def test_a_position_depends_on_no_other(outlier: float) -> None:
    positions, skew = places(), matrices(4)
    alone = exponentials(positions, skew, dtype=DOUBLE)
    positions[0, 7, 1] = outlier
    got = exponentials(positions, skew, dtype=DOUBLE)
    others = torch.arange(20) != 7
    torch.testing.assert_close(got[:, :, others], alone[:, :, others], rtol=0.0, atol=1e-15)
    assert got[:, :, 7].isfinite().all() == math.isfinite(outlier)


@pytest.mark.usefixtures("fast")
def test_equal_positions_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row, monomials = places(12), matrix_rotation._monomials
    positions, skew = torch.cat([row, row.flip(1), row]), matrices(4)
    counts: list[int] = []

    def counted(distinct: Tensor) -> Tensor:
        counts.append(len(distinct))
        return monomials(distinct)

    monkeypatch.setattr(matrix_rotation, "_monomials", counted)
    got = exponentials(positions, skew, dtype=DOUBLE)
    assert counts == [12]
    assert torch.equal(got[0], got[1].flip(1))
    torch.testing.assert_close(got, definition(positions, skew), rtol=0.0, atol=1e-13)


def gradients(positions: Tensor, skew: Tensor, weights: Tensor, *, exact: bool) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in (positions, skew)]
    made = definition(*inputs) if exact else exponentials(*inputs, dtype=DOUBLE)
    return list(torch.autograd.grad(made, inputs, weights))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("chunk", [1, 200, 2**18])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_gradients_are_those_of_matrix_exp(
    monkeypatch: pytest.MonkeyPatch, scale: float, chunk: int
) -> None:
    monkeypatch.setattr(matrix_rotation, "CHUNK", chunk)
    positions, skew = places(6, rows=2, scale=scale), matrices(4)
    weights = torch.randn(2, 2, 6, 3, 4, 4, dtype=DOUBLE)
    expected = gradients(positions, skew, weights, exact=True)
    got = gradients(positions, skew, weights, exact=False)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("fast")
def test_gradients_of_shared_positions_and_of_one_input() -> None:
    row, skew = places(9), matrices(4).requires_grad_()
    positions = torch.cat([row, row])
    weights = torch.randn(2, 2, 9, 3, 4, 4, dtype=DOUBLE)
    made = exponentials(positions, skew, dtype=DOUBLE)
    (got,) = torch.autograd.grad(made, skew, weights)
    (expected,) = torch.autograd.grad(definition(positions, skew), skew, weights)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    moved = positions.clone().requires_grad_()
    made = exponentials(moved, skew.detach(), dtype=DOUBLE)
    (got,) = torch.autograd.grad(made, moved, weights)
    (expected,) = torch.autograd.grad(definition(moved, skew.detach()), moved, weights)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_rotation, "FEWEST", 1)
    monkeypatch.setattr(matrix_rotation, "FEWEST_MATRICES", 1)
    inputs = places(2).requires_grad_(), matrices(3, heads=1, blocks=1).requires_grad_()
    torch.autograd.gradgradcheck(lambda p, a: exponentials(p, a, dtype=DOUBLE), inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_many_matrices_under_torch_func() -> None:
    positions, skew = places(64), torch.stack([matrices(4, blocks=8) for _ in range(2)])

    def loss(skew: Tensor, positions: Tensor) -> Tensor:
        return exponentials(positions, skew, dtype=DOUBLE).sin().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(skew, positions)
    for row, gradient in zip(skew, got, strict=True):
        leaf = row.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf, positions), leaf)
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)
    moves = torch.ones_like(positions)
    _, tangent = torch.func.jvp(lambda p: loss(skew[0], p), (positions,), (moves,))
    leaf = positions.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(skew[0], leaf), leaf)
    torch.testing.assert_close(tangent, expected.sum(), rtol=1e-10, atol=1e-10)
