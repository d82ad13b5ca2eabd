"""FoPE against its series, a token, pair and wave at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.fope import Fope
from posenc.encodings.query_key.p_rope import PRope
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs

N = 70
"""Training length at which heads of width 8 keep two of their four waves: 1 and 0.1 ≥ 2π/70."""


def series_by_loops(
    x: Tensor, layout: Layout, drawn: Tensor, *, adjacent: bool, length: int = N
) -> Tensor:
    """Every pair of a head times its complex series."""
    x = x.double().clone()
    pairs = x.shape[-1] // 2
    ladder = [10000.0 ** (-t / pairs) for t in range(pairs)]
    kept = [theta for theta in ladder if theta * length >= 2 * math.pi]
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():
        at = layout.positions[min(b, layout.positions.shape[0] - 1), i, 0].item()
        for t in range(len(kept)):
            real = imaginary = 0.0
            for m, theta in enumerate(kept):
                a, c = (drawn[part, h, m, t].item() + (m == t) for part in (0, 1))
                real += a * math.cos(at * theta)
                imaginary += c * math.sin(at * theta)
            places = (2 * t, 2 * t + 1) if adjacent else (t, t + pairs)
            first, second = (x[b, h, i, place].item() for place in places)
            turned = complex(first, second) * complex(real, imaginary)
            x[b, h, i, places[0]], x[b, h, i, places[1]] = turned.real, turned.imag
    return x


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_equals_loops(grid: Grid, pairing: str) -> None:
    q, k, v = inputs(grid)
    fope = Fope(heads=6, head_dim=8, max_length=N, gain=2.0, pairing=pairing)  # type: ignore[arg-type]
    assert fope.coefficients.shape == (2, 6, 2, 2)
    k_each = k.repeat_interleave(2, dim=1)
    turned = [
        series_by_loops(x, side, fope.coefficients, adjacent=pairing == "adjacent")
        for x, side in ((q, grid.query), (k_each, grid.key))
    ]
    expected = attention_by_loops(*turned, v.repeat_interleave(2, dim=1), grid)
    got = attend(q, k, v, grid, Encoding(query_key=fope))
    torch.testing.assert_close(got, expected, atol=3e-3, rtol=1e-3)


def test_gradients_equal_those_of_the_series() -> None:
    fope = Fope(heads=1, head_dim=4, max_length=700, learned=True).double()
    times = torch.tensor([0.0, 0.5, 7.0], dtype=torch.float64, requires_grad=True)
    grid = Grid.of(Layout.at(times))
    q, k = (torch.randn(1, 1, 3, 4).double().requires_grad_() for _ in range(2))

    def turned(x: Tensor) -> Tensor:
        theta = torch.tensor([1.0, 0.01], dtype=torch.float64)
        angles = times[:, None] * theta
        a, b = fope.coefficients[:, 0] + torch.eye(2)
        factor = torch.complex(angles.cos() @ a, angles.sin() @ b)
        product = torch.complex(*x[0, 0].chunk(2, -1)) * factor
        return torch.cat([product.real, product.imag], dim=-1)[None, None]

    both = (fope(q, k, grid), (turned(q), turned(k)))
    torch.testing.assert_close(*both)
    wanted = (q, k, times, fope.coefficients)
    sums = [sum(x.sin().sum() for x in pair) for pair in both]
    torch.testing.assert_close(*(torch.autograd.grad(total, wanted) for total in sums))


def test_a_product_by_hand() -> None:
    # One pair, θ = 1, a = 0.5, b = -1: F(p) = 1.5 cos p. (1, 0) at 1 with (1, 0) at 2 gives
    # 1.5 cos 1 · 1.5 cos 2 = 1.5² · 0.540302 · (-0.416147) = -0.505901.
    fope = Fope(heads=1, head_dim=2, max_length=7)
    fope.coefficients.copy_(torch.tensor([0.5, -1.0]).view(2, 1, 1, 1))
    one = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    turned, other = fope(one, one, Grid(Layout.sequence(1, 1), Layout.sequence(1, 2)))
    assert (turned * other).sum().item() == pytest.approx(-0.505901, abs=1e-6)


@pytest.mark.parametrize("length", [7, 62, 63, 512, 600_000])
def test_waves_slower_than_the_text_are_dropped(length: int) -> None:
    """A pair that does not come round once in training is left as it is; 62.8 tokens is 2π/0.1."""
    fope = Fope(heads=1, head_dim=16, max_length=length, base=1e8)
    ladder = [10.0**-t for t in range(8)]
    turning = sum(2 * math.pi / theta <= length for theta in ladder)
    assert fope.waves == turning == {7: 1, 62: 1, 63: 2, 512: 2, 600_000: 5}[length]
    x = torch.randn(1, 1, 9, 16)
    turned, _ = fope(x, x, Grid.of(Layout.sequence(9, start=3)))
    still = (turned == x).all(2).flatten().view(2, 8).all(0)
    assert still.tolist() == [t >= turning for t in range(8)]


def test_without_other_waves_it_is_p_rope() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    grid = Grid.of(Layout.sequence(5, start=9))
    alone = Fope(heads=2, head_dim=8, max_length=N, gain=0.0)(q, k, grid)
    torch.testing.assert_close(alone, PRope(head_dim=8, p=0.5)(q, k, grid))


def test_the_official_size_and_spread() -> None:
    """The paper's smallest model: heads of 64, 512 tokens, base 10000, 8 heads, gain 0.3."""
    torch.manual_seed(0)
    fope = Fope(heads=8, head_dim=64)
    assert fope.coefficients.shape == (2, 8, 16, 16)
    assert fope.coefficients.std().item() == pytest.approx(0.3 * (2 / (24 * 16)) ** 0.5, rel=0.05)
    assert not list(fope.parameters())
    assert "coefficients" in fope.state_dict()
    assert isinstance(Fope(heads=1, head_dim=8, learned=True).coefficients, torch.nn.Parameter)


def test_autocast_keeps_the_series() -> None:
    """The sum over waves is a matrix product, which autocast would make in bfloat16."""
    fope = Fope(heads=2, head_dim=8, gain=2.0)
    x, grid = torch.randn(1, 2, 9, 8), Grid.of(Layout.sequence(9, start=5000))
    with torch.autocast("cpu", torch.bfloat16):
        turned = fope(x, x, grid)
    torch.testing.assert_close(turned, fope(x, x, grid))


def double_data(part: Fope) -> None:
    part.coefficients.data.mul_(2.0)


def set_data(part: Fope) -> None:
    part.coefficients.data = 2.0 * part.coefficients


def double(part: Fope) -> None:
    part.coefficients.mul_(2.0)


@pytest.mark.parametrize("change", [double, double_data, set_data])
def test_changed_coefficients_rotate_anew(change: Callable[[Fope], None]) -> None:
    """Rotations are kept for a grid while nothing they are made of changes."""
    part = Fope(heads=2, head_dim=8, max_length=N)
    encoding, grid = Encoding.of(part), Grid.of(Layout.sequence(9), causal=True)
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    before = attend(q, k, v, grid, encoding)
    change(part)
    after = attend(q, k, v, grid, encoding)
    torch.testing.assert_close(after, attend(q, k, v, grid, encoding, backend="reference"))
    assert not torch.allclose(after, before, atol=1e-3)
