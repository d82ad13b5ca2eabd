"""Where results lie beside operands of any strides; ``attention_fuzz`` tries these themselves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.attention.backends.common.flash_cpu import flash_forward
from posenc.attention.backends.native.build import missing
from posenc.attention.dispatch import rotate
from posenc.errors import ArgumentError

HEADS, WIDTH = 4, 8


def test_the_raw_kernel_is_given_what_fits_only() -> None:
    q, k, v = torch.zeros(3, 1, 2, 5, 8)
    mask = torch.zeros(1, 1, 5, 5)
    assert flash_forward(q, k, v, mask)[0].shape == q.shape
    for wrong in (
        (q, k[:, :1], v, None),
        (q, k, v[:, :, :4], None),
        (q, k, v[..., :4], None),
        (q, k, v, torch.zeros(1, 8, 5, 5)),
        (q, k, v, mask[..., :4]),
    ):
        with pytest.raises(ArgumentError, match="operands of one batch size"):
            flash_forward(*wrong)


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
@pytest.mark.parametrize("name", ["alibi", "rope", "deberta", "cope", "tupe"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (2, 2)])
def test_outputs_and_gradients_lie_as_the_operands(name: str, heads: int, groups: int) -> None:
    """Heads of a token stay side by side: what a linear map makes and takes is not copied.

    Beside TUPE's factors, two heads are as wide as what one has to sum.
    """
    encoding, grid, operands = _of_linear_maps(name, groups, heads=heads)
    apart = [x.detach().contiguous().requires_grad_() for x in operands]
    results = []
    for tensors in (operands, apart):
        output = attend(*tensors, grid, encoding, backend="native")
        weighted = output * torch.arange(300.0)[:, None]
        results.append((output, *torch.autograd.grad(weighted.sum(), tensors)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert expected.is_contiguous()
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
@pytest.mark.parametrize("name", ["nope", "alibi", "rope"])
def test_outputs_of_prepared_calls_lie_as_the_values(name: str) -> None:
    encoding, grid, operands = _of_linear_maps(name, HEADS)
    with torch.no_grad():
        expected = attend(*operands, grid, encoding, backend="reference")
        for _ in range(3):  # the second call is prepared
            output = attend(*operands, grid, encoding)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.skipif(missing() is not None, reason="needs the compiled kernels")
def test_rotated_queries_lie_as_they_did() -> None:
    encoding, grid, (q, k, _) = _of_linear_maps("rope", HEADS)
    assert encoding.query_key is not None
    rotation = encoding.query_key.lower(q, k, grid)
    assert rotation is not None
    for rotated, expected in zip(rotate(rotation, q, k), rotation.apply(q, k), strict=True):
        torch.testing.assert_close(rotated, expected)
        assert rotated.transpose(1, 2).is_contiguous()


def _of_linear_maps(
    name: str, groups: int, *, heads: int = HEADS
) -> tuple[Encoding, Grid, list[Tensor]]:
    """An encoding, a causal grid, and operands whose tokens are rows of matrices."""
    torch.manual_seed(0)
    encoding = posenc.create(name, dim=heads * WIDTH, heads=heads, max_length=300, causal=True)
    rows = [torch.randn(2, 300, n, WIDTH, requires_grad=True) for n in (heads, groups, groups)]
    grid = Grid.of(Layout.sequence(300), causal=True)
    return encoding, grid, [x.transpose(1, 2) for x in rows]


@pytest.mark.parametrize(
    ("backend", "name"),
    [("sdpa", "nope"), *product(["native", "blockwise"], ["nope", "t5", "shaw"])],
)
def test_memory_of_the_other_sign(backend: str, name: str) -> None:
    """Such as the imaginary part of a conjugate, whose features are apart but for a single one."""
    encoding = posenc.create(name, heads=2, head_dim=1)
    grid, results = Grid.of(Layout.sequence(20)), []
    for form in (Tensor.detach, Tensor.resolve_neg):
        torch.manual_seed(0)
        *operands, gradient = (
            form(torch.randn(1, 2, 20, 1, dtype=torch.complex64).conj().imag) for _ in range(4)
        )
        leaves = [x.requires_grad_() for x in operands]
        output = attend(*leaves, grid, encoding, backend=backend)
        learned = [*leaves, *encoding.parameters()]
        results.append((output, *torch.autograd.grad(output, learned, gradient)))
        assert gradient.is_neg() == (form is not Tensor.resolve_neg)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["native", "blockwise", "sdpa"])
def test_gradients_of_the_lse_lie_as_they_like(backend: str) -> None:
    """Such as those of a loss that reads its transpose, in the dtype that kernels take."""
    operands = [torch.randn(2, HEADS, 20, WIDTH, requires_grad=True) for _ in range(3)]
    grid = Grid.of(Layout.sequence(20), causal=True)
    _, lse = attend(*operands, grid, Encoding(), backend=backend, return_lse=True)
    gradient = torch.randn(2, 20, HEADS).transpose(1, 2)
    got = torch.autograd.grad(lse, operands[:2], gradient, retain_graph=True)
    expected = torch.autograd.grad(lse, operands[:2], gradient.contiguous())
    torch.testing.assert_close(got, expected)
