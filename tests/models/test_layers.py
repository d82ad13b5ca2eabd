"""Norms: batch statistics come from real tokens alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posenc import Layout
from posenc.errors import UnknownNameError
from posenc.models.block import BatchNorm, make_norm, normalize

LAYOUT = Layout.padded([6, 2, 4])


def test_padding_counts_for_nothing() -> None:
    norm, oracle = BatchNorm(5), nn.BatchNorm1d(5)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 6, 5) * 3 + 1
        assert LAYOUT.valid is not None
        garbage = x.masked_fill(~LAYOUT.valid.unsqueeze(-1), float("nan"))
        torch.testing.assert_close(norm(garbage, LAYOUT)[LAYOUT.valid], oracle(x[LAYOUT.valid]))
    assert oracle.running_mean is not None
    assert oracle.running_var is not None
    torch.testing.assert_close(norm.mean, oracle.running_mean)
    torch.testing.assert_close(norm.variance, oracle.running_var)
    norm.eval(), oracle.eval()
    x = torch.randn(3, 6, 5)
    torch.testing.assert_close(norm(x, LAYOUT), oracle(x.mT).mT)


def test_without_padding_it_is_torchs() -> None:
    norm, oracle, x = BatchNorm(5), nn.BatchNorm1d(5), torch.randn(3, 6, 5, requires_grad=True)
    got, expected = norm(x, Layout.sequence(6)), oracle(x.mT).mT
    torch.testing.assert_close(got, expected)
    weight = torch.randn(3, 6, 5)
    (first,) = torch.autograd.grad((got * weight).sum(), x)
    (second,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(first, second)


def test_a_single_or_no_real_token_gives_no_nan() -> None:
    norm = BatchNorm(5)
    for lengths in ([1, 0, 0], [0, 0, 0]):
        assert norm(torch.randn(3, 6, 5), Layout.padded(lengths, 6)).isfinite().all()
    assert norm.mean.isfinite().all()
    assert norm.variance.isfinite().all()


def test_kinds_by_name() -> None:
    assert make_norm("layer", 4, eps=1e-3).eps == 1e-3
    assert make_norm("rms", 4).eps == 1e-6
    x = torch.randn(1, 3, 4)
    normal = normalize(make_norm("layer", 4), x, Layout.sequence(3))
    torch.testing.assert_close(normal.mean(-1), torch.zeros(1, 3), atol=1e-6, rtol=0)
    with pytest.raises(UnknownNameError, match="batch"):
        make_norm("batsh", 4)  # type: ignore[arg-type]


def test_half_precision_keeps_its_dtype() -> None:
    norm = BatchNorm(5).to(torch.bfloat16)
    assert norm(torch.randn(3, 6, 5, dtype=torch.bfloat16), LAYOUT).dtype == torch.bfloat16
