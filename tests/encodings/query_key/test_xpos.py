"""xPos against complex numbers in loops, each pair faded by a power of the distance."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from posenc import Attention, Encoding, Grid, Layout, attend
from posenc.attention import LayerCache
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.query_key.xpos import Xpos
from posenc.errors import ArgumentError
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn

CAUSAL = {
    name: Grid(grid.query, grid.key, causal=True, window=grid.window)
    for name, grid in GRIDS.items()
}


def fading_product(
    q: Tensor, k: Tensor, at: float, to: float, *, adjacent: bool = False, width: int = 8
) -> Tensor:
    """Σ_t Re(q_t k̄_t e^(i θ_t (at - to))) ζ_t^((at - to) / 512), a pair at a time."""
    total = torch.zeros((), dtype=torch.float64)
    half = width // 2
    for t in range(half):
        places = (2 * t, 2 * t + 1) if adjacent else (t, t + half)
        zeta = (t / half + 0.4) / 1.4
        turn = cmath.exp(1j * (at - to) * 10000 ** (-2 * t / width))
        first, second = (torch.complex(x[places[0]], x[places[1]]) for x in (q, k))
        total = total + (first * second.conj() * turn).real * zeta ** ((at - to) / 512)
    return total


@pytest.mark.parametrize(("grid", "pairing"), in_turn(1, CAUSAL, ["half", "adjacent"]))
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)
    expected = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = [
            j for j in range(k.shape[2]) if grid.visible[min(b, len(grid.visible) - 1), 0, i, j]
        ]
        if not seen:
            continue
        row = min(b, grid.query.positions.shape[0] - 1)
        logits = torch.stack(
            [
                fading_product(
                    q[b, h, i],
                    k[b, h // 2, j],
                    grid.query.positions[row, i, 0].item(),
                    grid.key.positions[row, j, 0].item(),
                    adjacent=pairing == "adjacent",
                )
                for j in seen
            ]
        )
        expected[b, h, i] = (logits / 8**0.5).softmax(0) @ v[b, h // 2, seen]
    xpos = Xpos(head_dim=8, pairing=pairing)  # type: ignore[arg-type]
    got = attend(q, k, v, grid, Encoding(query_key=xpos))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_a_pair_by_hand() -> None:
    # Width 2 has one pair with ζ = 0.4 / 1.4 = 2/7 and θ = 1. A whole number of turns and 512
    # tokens later, a product of ones (1·1 + 1·1) is 2 · 2/7.
    xpos = Xpos(head_dim=2, scale_base=2 * math.pi)
    one = torch.ones(1, 1, 1, 2).double()
    turned, other = xpos(
        one, one, Grid(Layout.at(torch.tensor([2 * math.pi]).double()), Layout.sequence(1))
    )
    assert (turned * other).sum().item() == pytest.approx(4 / 7)


def test_without_fading_it_is_rope() -> None:
    """xPos with ζ = 1 is RoPE."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    grid = Grid.of(Layout.sequence(5, start=100), causal=True)
    expected = Rope(head_dim=8)(q, k, grid)
    torch.testing.assert_close(Xpos(head_dim=8, scale_base=1e12)(q, k, grid), expected)
    torch.testing.assert_close(Xpos(head_dim=8, gamma=1e12)(q, k, grid), expected)


def test_one_centre_under_a_cache() -> None:
    """rotary-embedding-torch #27, x-transformers #233: queries and cached keys share a centre."""
    encoding = Encoding(query_key=Xpos(head_dim=8, scale_base=4.0))
    layer = Attention(dim=16, heads=2, encoding=encoding, causal=True).eval()
    x, cache = torch.randn(1, 40, 16), LayerCache()
    whole = layer(x, Layout.sequence(40))
    parts = [layer(x[:, i : i + 8], Layout.sequence(8, i), cache=cache) for i in range(0, 40, 8)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoding_is_exact_at_any_distance(dtype: torch.dtype) -> None:
    """A million tokens on, a scale counted from position 0 has long been infinite."""
    times = torch.tensor([0.0, 900_000.0, 999_000.0, 999_990.0, 999_999.0, 1_000_000.0])
    grid = Grid(Layout.at(times[-1:]), Layout.at(times), causal=True)
    q, k = torch.randn(1, 1, 1, 8).to(dtype), torch.randn(1, 1, 6, 8).to(dtype)
    turned, other = Xpos(head_dim=8)(q, k, grid)
    assert turned.dtype == other.dtype == dtype
    got = (turned.double() @ other.double().mT).flatten()
    expected = [
        fading_product(q.flatten().double(), k[0, 0, j].double(), 1e6, time.item())
        for j, time in enumerate(times)
    ]
    # In float32 an angle at 1,000,000 is off by up to 0.03.
    torch.testing.assert_close(got, torch.stack(expected), atol=0.2, rtol=0.02)
    assert got[0].abs() < 1e-12 or dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_overflows_over_any_span(dtype: torch.dtype) -> None:
    """rotary-embedding-torch #8: NaN. Hidden keys ahead must stay finite too."""
    times = torch.linspace(0, 10_000_000, 65).round()
    q, k, v = (torch.randn(1, 2, 65, 8).to(dtype).requires_grad_() for _ in range(3))
    grid = Grid.of(Layout.at(times), causal=True)
    xpos = Xpos(head_dim=8)
    turned, other = xpos(q, k, grid)
    assert (turned.float() @ other.float().mT).isfinite().all()
    for backend in ("reference", "sdpa"):
        output = attend(q, k, v, grid, Encoding(query_key=xpos), backend=backend)
        gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v))
        assert all(x.isfinite().all() for x in (output, *gradients))


def test_own_products_never_fade() -> None:
    """However long the span, a token's product with itself is that without positions."""
    times = torch.linspace(0, 1_000_000, 9).round()
    x = torch.randn(1, 1, 9, 8)
    turned, other = Xpos(head_dim=8)(x, x, Grid.of(Layout.at(times), causal=True))
    torch.testing.assert_close((turned * other).sum(-1), x.square().sum(-1))


def test_spans_that_fit_are_exact() -> None:
    """As documented: 32,000 tokens between the first and the last query, in float32."""
    xpos = Xpos(head_dim=8)
    span = (
        2 * 0.45 * math.log(torch.finfo(torch.float32).max) / -xpos.log_decay(like=torch.ones(1))[0]
    )
    assert 32_000 < span < 33_000
    times = torch.tensor([0.0, 31_000.0, 31_500.0, 32_000.0])
    one = torch.ones(1, 1, 4, 8)
    turned, other = xpos(one, one, Grid.of(Layout.at(times), causal=True))
    expected = torch.stack(
        [fading_product(*one[0, 0, :2].double(), 32_000.0, time.item()) for time in times]
    )
    torch.testing.assert_close(
        (turned @ other.mT)[0, 0, 3].double(), expected, atol=0.02, rtol=0.01
    )


def test_bidirectional_is_refused() -> None:
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(ArgumentError, match="causal"):
        attend(x, x, x, Grid.of(Layout.sequence(3)), Encoding(query_key=Xpos(head_dim=8)))
