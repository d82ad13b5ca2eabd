"""Ropes whose frequencies change: identities, numbers by hand, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend, create
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension import EXTENSIONS, NotApplicable, advice, extend
from posenc.testing.oracles import attention_by_loops


def rope(**options: Any) -> Encoding:
    return create("rope", **({"head_dim": 16} | options))


FIXED = [
    name
    for name, entry in EXTENSIONS.items()
    if entry.level == "encoding" and "rope" in entry.on
    if type(extend(rope(), name, factor=1.5, length=64).query_key) is Rope
]
"""Methods that only divide the frequencies of a rope, by the same at every length."""


def stretched(method: str, *, factor: float = 4, length: float = 64, **options: Any) -> Rope:
    part = extend(rope(), method, factor=factor, length=length, **options).query_key
    assert isinstance(part, Rope)
    return part


def frequencies(part: Rope) -> list[float]:
    speeds: list[float] = part.frequencies(like=torch.empty((), dtype=torch.float64)).tolist()
    return speeds


def outputs(encoding: Encoding, length: int = 40, *, start: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, length, 16, generator=generator).double() for _ in range(3))
    return attend(q, k, v, Grid.of(Layout.sequence(length, start), causal=True), encoding)


@pytest.mark.parametrize(
    "method",
    sorted(
        name
        for name, entry in EXTENSIONS.items()
        if entry.level != "model" and entry.claims.identity_at_one and "rope" in entry.on
    ),
)
def test_factor_one_is_the_identity(method: str) -> None:
    encoding = extend(rope(), method, factor=1, length=16)
    torch.testing.assert_close(outputs(encoding), outputs(rope()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    sorted(
        name
        for name, entry in EXTENSIONS.items()
        if entry.level != "model" and {"rope", "any"} & set(entry.on)
    ),
)
def test_short_texts_are_as_before_where_claimed(method: str) -> None:
    entry = EXTENSIONS[method]
    encoding = extend(rope(), method, factor=1.5, length=40)
    same = torch.allclose(outputs(encoding), outputs(rope()), rtol=1e-6, atol=1e-6)
    clipped_later = {"leaky_rerope", "rerope", "self_extend", "string", "dual_chunk"}
    assert same == (entry.claims.short_unchanged and method not in clipped_later)


def test_interpolation_divides_positions() -> None:
    moved = Layout.at(torch.arange(40) / 4.0)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 40, 16, generator=generator).double() for _ in range(3))
    expected = attend(q, k, v, Grid.of(moved, causal=True), rope())
    got = outputs(extend(rope(), "interpolate", factor=4))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_interpolation_twice() -> None:
    once = extend(extend(rope(), "interpolate", factor=2), "interpolate", factor=3)
    assert isinstance(once.query_key, Rope)
    assert frequencies(once.query_key) == pytest.approx(
        frequencies(stretched("interpolate", factor=6))
    )


@pytest.mark.parametrize("name", ["alibi", "sinusoidal"])
def test_what_reads_positions_is_interpolated_twice(name: str) -> None:
    encoding = create(name, dim=16, heads=2)
    twice = extend(extend(encoding, "interpolate", factor=2), "interpolate", factor=3)
    once, layout, x = (
        extend(encoding, "interpolate", factor=6),
        Layout.sequence(9),
        torch.ones(1, 9, 16),
    )
    torch.testing.assert_close(twice.embed(x, layout), once.embed(x, layout))
    if once.score is not None:
        grid = Grid.of(layout)
        torch.testing.assert_close(twice.bias(grid), once.bias(grid))


def test_ntk_is_a_larger_base() -> None:
    base = 10000 * 4 ** (16 / 14)
    assert frequencies(stretched("ntk")) == pytest.approx(
        [base ** (-2 * t / 16) for t in range(8)], rel=1e-12
    )


def test_ntk_ends_where_interpolation_does() -> None:
    ntk, interpolated = frequencies(stretched("ntk")), frequencies(stretched("interpolate"))
    original = frequencies(Rope(head_dim=16))
    assert ntk[0] == original[0]
    assert ntk[-1] == pytest.approx(interpolated[-1], rel=1e-12)
    assert all(a > b for a, b in zip(ntk[:-1], interpolated[:-1], strict=True))


def test_by_parts_by_hand() -> None:
    # Within 64 tokens pair 1 turns 64 · 10^-½ / 2π = 3.221 times: (3.221 - 1) / (32 - 1) stays.
    share = (64 / math.sqrt(10) / (2 * math.pi) - 1) / 31
    theta = 10**-0.5
    assert frequencies(stretched("ntk_by_parts"))[1] == pytest.approx(
        (1 - share) * theta / 4 + share * theta, rel=1e-12
    )


def test_llama3_is_by_parts_with_another_ramp() -> None:
    by_parts = stretched("ntk_by_parts", alpha=1, beta=4)
    assert frequencies(stretched("llama3")) == pytest.approx(frequencies(by_parts), rel=1e-12)


def test_yarn_by_hand() -> None:
    # Pair 8 ln(512 / 2πr) / (2 ln 10⁴) turns r times within 512: 0.41 for r = 32, 1.91 for r = 1.
    encoding, options = rope(head_dim=8), {"factor": 4, "length": 512}
    rounded = extend(encoding, "yarn", **options).query_key
    exact = extend(encoding, "yarn", **options, truncate=False).query_key
    assert isinstance(rounded, Rope)
    assert isinstance(exact, Rope)
    assert rounded.divisors == pytest.approx([1, 1.6, 4, 4])
    low, high = (8 * math.log(512 / math.tau / r) / math.log(1e8) for r in (32, 1))
    share = (high - 1) / (high - low)
    assert exact.divisors == pytest.approx([1, 1 / (share + (1 - share) / 4), 4, 4])


def test_yarn_scales_the_logits_by_the_square_of_its_temperature() -> None:
    q = torch.randn(1, 1, 1, 16).double()
    here = Grid.of(Layout.sequence(1))
    turned, others = stretched("yarn", factor=8)(q, q, here)
    contrast = ((turned * others).sum() / (q * q).sum()).item()
    assert contrast == pytest.approx((0.1 * math.log(8) + 1) ** 2, rel=1e-6)


@pytest.mark.parametrize("method", FIXED)
def test_equals_loops(method: str) -> None:
    part = stretched(method)
    speeds = frequencies(part)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=generator).double() for _ in range(3))
    grid = Grid.of(Layout.sequence(9, start=100), causal=True)

    def turn(x: torch.Tensor, by: float) -> torch.Tensor:
        first, second = x[:8], x[8:]
        cosine = torch.tensor([math.cos(by * each) for each in speeds])
        sine = torch.tensor([math.sin(by * each) for each in speeds])
        return part.gain * torch.cat(
            [first * cosine - second * sine, first * sine + second * cosine]
        )

    expected = attention_by_loops(
        q, k, v, grid, logit=lambda a, b, _, at, to: turn(a, at) @ turn(b, to) / 4
    )
    got = attend(q, k, v, grid, Encoding.of(part))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [*FIXED, "dynamic_ntk", "longrope"])
def test_learned_frequencies_stay_learned(method: str) -> None:
    encoding = rope(learned=True)
    longer = extend(encoding, method, factor=4, length=16)
    outputs(longer).sum().backward()
    assert isinstance(encoding.query_key, Rope)
    assert encoding.query_key.log_frequencies is not None
    assert encoding.query_key.log_frequencies.grad is not None
    assert list(longer.parameters()) == [encoding.query_key.log_frequencies]


@pytest.mark.parametrize("method", [*FIXED, "dynamic_ntk", "longrope"])
def test_the_original_is_untouched(method: str) -> None:
    encoding = rope()
    before = outputs(encoding)
    extend(encoding, method, factor=4, length=16)
    torch.testing.assert_close(outputs(encoding), before)


def test_other_parts_stay() -> None:
    encoding = rope() + create("alibi", heads=2)
    longer = extend(encoding, "yarn", factor=4, length=64)
    assert longer.score is encoding.score


def test_partial_rotation_keeps_the_rest() -> None:
    """Liger #1451."""
    q = torch.randn(1, 1, 5, 16)
    part = extend(rope(fraction=0.5), "yarn", factor=4, length=64).query_key
    assert part is not None
    turned, _ = part(q, q, Grid.of(Layout.sequence(5)))
    torch.testing.assert_close(turned[..., 8:], q[..., 8:], rtol=0, atol=0)


def test_yarn_tells_of_short_lengths() -> None:
    """At length 64 no pair turns 32 times: the default ramp is not what its names say."""
    told = " ".join(advice(rope(), "yarn", factor=4, length=64))
    assert "beta=32 is out of reach" in told
    assert "10.2 times" in told
    slowed = "pair 1 turns 3.22 times and is slowed 1.33 times, pair 2 turns 1.02 times and is "
    assert slowed + "slowed 2 times." in told
    assert stretched("yarn").divisors[1:3] == pytest.approx([4 / 3, 2])
    long = " ".join(advice(rope(), "yarn", factor=4, length=4096))
    assert "out of reach" not in long
    assert "slowed" not in long
    chosen = " ".join(advice(rope(), "yarn", factor=4, length=64, alpha=0.5, beta=4))
    assert "out of reach" not in chosen
    none = " ".join(advice(rope(), "yarn", factor=4, length=64, alpha=40, beta=64))
    assert "nothing at all is interpolated" in none


def test_advice_is_true() -> None:
    """Frequencies that it promises to keep stay the same."""
    told = advice(rope(), "llama3", factor=4, length=64)[0]
    assert told.startswith("Of 8 pairs 1 turn 4 times or more")
    divisors = stretched("llama3").divisors
    assert divisors is not None
    assert [each == 1 for each in divisors] == [True] + [False] * 7
    assert sum(each == pytest.approx(4) for each in divisors) == 5


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ntk", {"factor": 0.5}, "factor: expected .*1 or more"),
        ("ntk", {"factor": float("nan")}, "factor: expected .*1 or more"),
        ("yarn", {"length": 1}, "length"),
        ("yarn", {"alpha": 4, "beta": 4}, "alpha < beta"),
        ("yarn", {"alpha": 0}, "alpha"),
        ("yarn", {"temperature": -1.0}, "temperature"),
        ("ntk_by_parts", {"beta": float("inf")}, "beta: expected a finite number"),
        ("llama3", {"low": 4.0}, "low < high"),
        ("longrope", {"long_factors": [1.0]}, "long_factors: expected 8"),
        ("longrope", {"short_factors": [0.0] * 8}, "short_factors"),
        ("longrope", {"temperature": 0.0}, "temperature"),
    ],
)
def test_bad_arguments(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        extend(rope(), method, **({"factor": 4, "length": 64} | options))


@pytest.mark.parametrize("method", ["dynamic_ntk", "llama3", "longrope", "ntk", "yarn"])
def test_stretching_what_is_stretched_is_refused(method: str) -> None:
    once = extend(rope(), "yarn", factor=2, length=64)
    with pytest.raises(NotApplicable, match="stretched already"):
        extend(once, method, factor=2, length=64)


def test_one_pair_has_no_base() -> None:
    for method in ("ntk", "dynamic_ntk"):
        with pytest.raises(ArgumentError, match="one pair"):
            extend(rope(head_dim=2), method, factor=2, length=64)


def test_rounding_can_undo_a_shorter_ramp() -> None:
    """Why the advice for short lengths names truncate too."""
    defaults = stretched("yarn").divisors
    assert stretched("yarn", alpha=0.5, beta=4).divisors == defaults
    exact = stretched("yarn", alpha=0.5, beta=4, truncate=False).divisors
    assert exact is not None
    assert defaults is not None
    assert exact[1] < defaults[1]
