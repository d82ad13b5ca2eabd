"""RoPE of times: unix seconds against fractions, and TO-RoPE's three forms against loops."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.query_key.axial_rope import AxialRope
from posenc.encodings.query_key.rope import Rope

DAY = 86_400.0
SECONDS = (1.7e9, 1.7e9 + 1, 1.7e9 + 61.5, 1.7e9 + 3.25 * DAY, 1.7e9 + 400 * DAY)
HEADS, PAIRS = 3, 4


def events(*seconds: float) -> Layout:
    """Events in order, at these times."""
    places = [(float(place), time) for place, time in enumerate(seconds)]
    return Layout.at(torch.tensor([places], dtype=torch.float64))


def arctan_of_inverse(x: int) -> Fraction:
    return sum(
        ((-1) ** n * Fraction(1, (2 * n + 1) * x ** (2 * n + 1)) for n in range(60)),
        start=Fraction(),
    )


TURN = 8 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
"""2π to eighty digits, by Machin's formula."""


def modulo_turns(angle: Fraction) -> float:
    return float(angle - round(angle / TURN) * TURN)


@pytest.mark.parametrize("seconds", [SECONDS, (1e12, -1e12 + 0.125, 2.0**50 + 1)])
def test_angles_of_unix_seconds_are_exact(seconds: tuple[float, ...]) -> None:
    """A base of 2^n and a unit of 2^16 seconds make every frequency an exact number."""
    options = {"pairs": (0, PAIRS), "base": 2.0**PAIRS, "step": 2.0**-16}
    axial = AxialRope(head_dim=2 * PAIRS, **options).angles(events(*seconds))
    times = torch.tensor(seconds, dtype=torch.float64)
    rope = Rope(head_dim=2 * PAIRS, base=2.0**PAIRS, divisors=(2.0**16,) * PAIRS)
    of_times = rope.angles(Layout.at(times))
    exact = [
        [modulo_turns(Fraction(time) / 2 ** (16 + pair)) for pair in range(PAIRS)]
        for time in seconds
    ]
    expected = torch.tensor([exact], dtype=torch.float64)
    torch.testing.assert_close(axial, expected, rtol=0, atol=1e-5 if max(seconds) > 2e9 else 1e-11)
    torch.testing.assert_close(of_times, axial)


@pytest.mark.parametrize("unit", [1.0, DAY])
def test_differences_of_times_alone_count(unit: float) -> None:
    """1.6e9 seconds later all angles are later by the same, to 1e-12 radians."""
    rope = AxialRope(head_dim=16, pairs=(3, 5), step=(1.0, 1 / unit))
    first, later = (rope.angles(events(*times)) for times in (SECONDS, shifted(SECONDS)))
    turned = later - first
    torch.testing.assert_close(
        (turned - turned[:, :1]).sin(), torch.zeros_like(turned), rtol=0, atol=1e-12
    )


def shifted(seconds: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(time - 1.6e9 for time in seconds)


def angle(form: str, head: int, pair: int, places: float, seconds: float) -> float:
    """Of a difference of places and of times, in days; ladders of 100 and of 1000."""
    of_place, of_time = places * 100 ** (-pair / PAIRS), seconds / DAY * 1000 ** (-pair / PAIRS)
    if form == "early fusion":
        return of_place + of_time
    if form == "split by head":
        return of_place if head == 0 else of_time
    half = PAIRS // 2  # split by dimension: two ladders one after the other
    if pair < half:
        return places * 100 ** (-pair / half)
    return seconds / DAY * 1000 ** (-(pair - half) / half)


def rope_of(form: str) -> AxialRope:
    if form == "split by dimension":
        options = {"pairs": (PAIRS // 2,) * 2, "base": (100.0, 1000.0), "step": (1.0, 1 / DAY)}
        return AxialRope(head_dim=2 * PAIRS, **options)
    options = {"pairs": (PAIRS, 0), "learned": True, "step": (1.0, 1 / DAY)}
    rope = AxialRope(head_dim=2 * PAIRS, heads=HEADS, **options).double()
    assert rope.frequencies is not None
    with torch.no_grad():
        for axis, base in enumerate((100.0, 1000.0)):
            rope.frequencies[axis] = base ** (-torch.arange(PAIRS).double() / PAIRS)
        if form == "split by head":
            rope.frequencies[1, 0] = 0.0
            rope.frequencies[0, 1:] = 0.0
    return rope


def outputs_by_loops(form: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pairs of features as complex numbers, rotated by differences of place and time."""
    length = len(SECONDS)
    queries, keys = (torch.view_as_complex(x.unflatten(-1, (PAIRS, 2))) for x in (q, k))
    weights = torch.zeros(1, HEADS, length, length, dtype=torch.float64)
    for h, i, j in torch.cartesian_prod(*map(torch.arange, (HEADS, length, length))).tolist():
        between = i - j, SECONDS[i] - SECONDS[j]
        for pair in range(PAIRS):
            turn = complex(math.cos(a := angle(form, h, pair, *between)), math.sin(a))
            weights[0, h, i, j] += (queries[0, h, i, pair] * keys[0, h, j, pair].conj() * turn).real
    weights = (weights / math.sqrt(2 * PAIRS)).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
    )
    return weights.softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["early fusion", "split by dimension", "split by head"])
def test_equals_loops_of_differences(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (3, 1, HEADS, len(SECONDS), 2 * PAIRS)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64).unbind()
    encoding = Encoding(query_key=rope_of(form))
    got = attend(
        *(x.to(dtype) for x in (q, k, v)), Grid.of(events(*SECONDS), causal=True), encoding
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    expected = outputs_by_loops(form, q, k, v)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
