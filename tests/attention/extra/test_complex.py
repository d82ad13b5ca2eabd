"""Complex attention against Python's own complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, create
from posenc.attention import BACKENDS
from posenc.attention.extra.complex import ComplexProduct, attend_complex
from posenc.errors import ArgumentError, BackendRefusal, UnknownNameError

PRODUCTS: tuple[ComplexProduct, ...] = ("real", "modulus")
HEADS, KV_HEADS, WIDTH = 4, 2, 3


def inputs(queries: int, keys: int, *, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def draw(heads: int, length: int, width: int) -> Tensor:
        shape = (rows, heads, length, width)
        return torch.randn(shape, generator=generator, dtype=torch.complex128)

    return draw(HEADS, queries, WIDTH), draw(KV_HEADS, keys, WIDTH), draw(KV_HEADS, keys, 5)


def loops(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, product: str, bias: Tensor | None = None
) -> Tensor:
    rows, heads, queries, width = q.shape
    output = torch.zeros(rows, heads, queries, v.shape[-1], dtype=torch.complex128)
    visible = grid.visible.expand(rows, 1, queries, k.shape[2])
    for b in range(rows):
        for h in range(heads):
            group = h * k.shape[1] // heads
            for i in range(queries):
                weights = {}
                for j in range(k.shape[2]):
                    if not visible[b, 0, i, j]:
                        continue
                    hermitian = sum(
                        q[b, h, i, d].item() * k[b, group, j, d].item().conjugate()
                        for d in range(width)
                    )
                    logit = abs(hermitian) if product == "modulus" else complex(hermitian).real
                    added = 0.0 if bias is None else bias[h, i, j].item()
                    weights[j] = math.exp(logit / math.sqrt(width) + added)
                for j, weight in weights.items():
                    output[b, h, i] += weight / sum(weights.values()) * v[b, group, j]
    return output


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "grid",
    [
        Grid.of(Layout.sequence(5), causal=True),
        Grid.of(Layout.sequence(5)),
        Grid(Layout.sequence(2, start=3), Layout.sequence(5), causal=True, window=2),
        Grid.of(Layout.padded([2, 5], side="left"), causal=True),
        Grid.of(Layout.sequence(1)),
    ],
    ids=["causal", "both ways", "window", "padded", "one token"],
)
def test_equals_loops(grid: Grid, product: ComplexProduct) -> None:
    q, k, v = inputs(grid.query.length, grid.key.length)
    got = attend_complex(q, k, v, grid, Encoding(), product=product)
    torch.testing.assert_close(got, loops(q, k, v, grid, product))


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_score_is_added_to_the_real_logit(product: ComplexProduct) -> None:
    grid = Grid.of(Layout.sequence(5), causal=True)
    encoding = create("alibi", heads=HEADS)
    assert encoding.score is not None
    q, k, v = inputs(5, 5)
    bias = encoding.score(q.real, q.real, grid, scale=1.0)[0]
    got = attend_complex(q, k, v, grid, encoding, product=product)
    torch.testing.assert_close(got, loops(q, k, v, grid, product, bias))


@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_are_right(product: ComplexProduct) -> None:
    grid = Grid.of(Layout.sequence(4), causal=True)
    tensors = [x.requires_grad_() for x in inputs(4, 4, rows=1)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_complex(q, k, v, grid, Encoding(), product=product)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_modulus_of_nothing_has_a_finite_gradient() -> None:
    grid = Grid.of(Layout.sequence(3))
    q, k, v = (x.mul(0).requires_grad_() for x in inputs(3, 3))
    output = attend_complex(q, k, v, grid, Encoding(), product="modulus")
    gradients = torch.autograd.grad(output.abs().square().sum() + output.real.sum(), (q, k, v))
    assert all(bool(torch.isfinite(torch.view_as_real(g)).all()) for g in gradients)


def test_a_number_by_hand() -> None:
    """A query i sees keys 1 and i: products i and 1, real parts 0 and 1, moduli 1 and 1."""
    q = torch.tensor([1j]).view(1, 1, 1, 1)
    k = torch.tensor([1 + 0j, 1j]).view(1, 1, 2, 1)
    v = torch.tensor([1 + 0j, 1j]).view(1, 1, 2, 1)
    grid = Grid(Layout.sequence(1), Layout.sequence(2))
    share = math.e / (1 + math.e)
    real = attend_complex(q, k, v, grid, Encoding(), product="real").item()
    assert real == pytest.approx(complex(1 - share, share), abs=1e-6)
    modulus = attend_complex(q, k, v, grid, Encoding(), product="modulus").item()
    assert modulus == pytest.approx(0.5 + 0.5j, abs=1e-6)


@pytest.mark.parametrize("product", PRODUCTS)
def test_backends_agree_or_refuse(product: ComplexProduct) -> None:
    grid = Grid.of(Layout.sequence(5), causal=True)
    q, k, v = inputs(5, 5)
    expected = attend_complex(q, k, v, grid, Encoding(), product=product, backend="reference")
    served = []
    for name in BACKENDS:
        try:
            got = attend_complex(q, k, v, grid, Encoding(), product=product, backend=name)
        except BackendRefusal:
            continue
        torch.testing.assert_close(got, expected)
        served.append(name)
    assert ("sdpa" in served) == (product == "real")


def test_autocast_narrows_the_products_only() -> None:
    grid = Grid.of(Layout.sequence(5))
    tensors = [x.to(torch.complex64) for x in inputs(5, 5)]
    expected = attend_complex(*tensors, grid, Encoding())
    with torch.autocast("cpu", torch.bfloat16):
        got = attend_complex(*tensors, grid, Encoding())
    assert got.dtype == torch.complex64
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_a_row_that_sees_nothing_is_zero() -> None:
    grid = Grid(Layout.sequence(3), Layout.sequence(3, start=2), causal=True)
    q, k, v = inputs(3, 3)
    for product in PRODUCTS:
        got = attend_complex(q, k, v, grid, Encoding(), product=product)
        assert torch.equal(got[:, :, :2], torch.zeros_like(got[:, :, :2]))


def test_refusals() -> None:
    grid = Grid.of(Layout.sequence(3))
    q, k, v = inputs(3, 3)
    with pytest.raises(ArgumentError, match=r"^v: expected a complex dtype"):
        attend_complex(q, k, v.real, grid, Encoding())
    with pytest.raises(UnknownNameError, match="modulus"):
        attend_complex(q, k, v, grid, Encoding(), product="modulo")  # type: ignore[arg-type]
    for product in PRODUCTS:
        with pytest.raises(ArgumentError, match="heads"):
            attend_complex(q[:, :3], k, v, grid, Encoding(), product=product)
