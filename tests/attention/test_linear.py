"""The kernel of linear layers against products in float64, for every number of rows and type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc.attention.backends.native.linear import has_linear, linear
from tests.attention.comparing import built
from tests.support.guarded import guarded

pytestmark = built

SIZES = ((16, 32), (48, 96), (144, 64), (2064, 32), (16, 20000 // 32 * 32), (576, 1536))
"""Outputs and inputs: in one item of work and in several, of which the last is not whole."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return guarded(torch.randn(shape, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_exact_up_to_rounding(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outputs)
    weight, bias = drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype)
    unit = torch.finfo(dtype).eps
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for rows in (1, 2, 3, 4, 5, 7, 8):
        x = drawn(rows, inputs, dtype=dtype)
        for added in (None, bias):
            got = linear(x, weight, added)
            exact = nn_linear(x, weight, added)
            size = x.double().abs() @ weight.double().abs().T
            allowed = unit * exact.abs() + inputs * wide * size
            assert ((got.double() - exact).abs() <= allowed).all(), (rows, added is None)
            assert got.dtype == dtype
    whole = torch.arange(inputs, dtype=torch.float64) % 3 - 1  # sums are exact in any order
    got = linear(whole.to(dtype).unsqueeze(0), torch.ones_like(weight), None)
    assert got.double().tolist() == [[whole.sum().item()] * outputs]


def nn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = x.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    weight = torch.ones(32, 64, dtype=dtype)
    weight[3, 40], weight[4, 41], weight[5, 0] = torch.nan, torch.inf, -torch.inf
    x = torch.ones(2, 64, dtype=dtype)
    x[1, 0] = 0
    expected = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(linear(x, weight, None), expected, equal_nan=True)


def test_results_do_not_depend_on_threads() -> None:
    weight, x = torch.randn(1040, 256), torch.randn(3, 5, 256).transpose(0, 1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(linear(x, weight, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], x @ weight.T)


def test_sizes_that_have_a_kernel() -> None:
    assert has_linear(16, 32, torch.float32)
    for outputs, inputs in ((0, 32), (16, 0), (8, 32), (17, 32), (16, 16), (16, 48)):
        assert not has_linear(outputs, inputs, torch.float32)
    assert not has_linear(16, 32, torch.int8)
