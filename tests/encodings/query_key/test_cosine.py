"""Cosine logits against loops."""

from __future__ import annotations

import math

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.swin_v2 import CosineLogits
from posenc.errors import ArgumentError


def test_logits_are_scaled_cosines_whatever_the_lengths() -> None:
    cosine = CosineLogits(heads=4).double()
    with torch.no_grad():
        cosine.log_scale.copy_(torch.tensor([0.0, 1.0, 4.0, 9.0]).double())
    q = 30 * torch.randn(2, 4, 3, 8, dtype=torch.float64)
    k = 0.01 * torch.randn(2, 2, 5, 8, dtype=torch.float64)
    grid = Grid(Layout.sequence(3), Layout.sequence(5))
    changed_q, changed_k = cosine(q, k, grid)
    logits = changed_q @ changed_k.repeat_interleave(2, dim=1).mT
    for h, factor in enumerate((1.0, math.e, math.e**4, 100.0)):
        for i in range(3):
            for j in range(5):
                a, b = q[1, h, i], k[1, h // 2, j]
                cosine_ij = (a @ b) / (a.norm() * b.norm())
                assert logits[1, h, i, j].item() == pytest.approx(factor * cosine_ij.item())


def test_a_record_with_it_has_scale_one() -> None:
    encoding = Encoding.of(CosineLogits(heads=2))
    assert encoding.default_scale(64) == 1.0
    assert Encoding.of(Rope(head_dim=64)).default_scale(64) == 0.125
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    grid = Grid.of(Layout.sequence(4), causal=True)
    default = attend(q, k, v, grid, encoding)
    torch.testing.assert_close(default, attend(q, k, v, grid, encoding, scale=1.0))


def test_a_zero_query_gives_zero_and_finite_gradients() -> None:
    q = torch.zeros(1, 2, 3, 4, requires_grad=True)
    grid = Grid.of(Layout.sequence(3))
    changed, _ = CosineLogits(heads=2)(q, q, grid)
    assert changed.abs().max().item() == 0.0
    changed.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_half_precision_is_normalised_in_float32() -> None:
    q = torch.full((1, 1, 1, 4), 3e4, dtype=torch.float16)  # its square is beyond float16
    changed, key = CosineLogits(heads=1)(q, q, Grid.of(Layout.sequence(1)))
    assert changed.dtype == torch.float16
    assert key.flatten().tolist() == [0.5] * 4
    assert (changed * key).sum().item() == pytest.approx(10.0, rel=1e-3)


def test_bad_options() -> None:
    with pytest.raises(ArgumentError, match="heads"):
        CosineLogits(heads=0)
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ArgumentError, match="heads 2"):
        CosineLogits(heads=2)(q, q, Grid.of(Layout.sequence(2)))
