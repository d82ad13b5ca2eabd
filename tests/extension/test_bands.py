"""Clipped, leaky, grouped, chunked and shifted distances against loops over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create, explain
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend
from posenc.extension.banded import BandedRope
from posenc.extension.methods.self_extend import SelfExtend
from posenc.testing.oracles import attention_by_loops
from tests.support.exhaustive import in_turn

Distance = Callable[[float, float], float]
"""(query position, key position) to what counts as query - key."""


def clipped(i: float, j: float) -> float:
    return math.copysign(min(abs(i - j), 5), i - j)


def leaky(i: float, j: float) -> float:
    apart = abs(i - j)
    return math.copysign(apart if apart < 5 else 5 + (apart - 5) / 3, i - j)


def grouped(i: float, j: float) -> float:
    if abs(i - j) < 5:
        return i - j
    ahead = 5 - 5 // 3
    return math.floor(i / 3) - math.floor(j / 3) + (ahead if i > j else -ahead)


def chunked(i: float, j: float, *, reach: float = 6, local: float = 2) -> float:
    size = reach - local
    apart = i // size - j // size
    if apart == 0:
        return i - j
    return min(i % size + size if apart == 1 else 2 * size - 1, reach) - j % size


def shifted(i: float, j: float) -> float:
    return i - j if i - j < 6 else i - j - 6 + 2


CASES: dict[str, tuple[dict[str, Any], Distance]] = {
    "dual_chunk": ({"reach": 6, "local": 2}, chunked),
    "leaky_rerope": ({"window": 5, "leak": 3}, leaky),
    "rerope": ({"window": 5}, clipped),
    "self_extend": ({"window": 5, "group": 3}, grouped),
    "string": ({"shift": 6, "local": 2}, shifted),
}
IRREGULAR = torch.stack([torch.arange(9) * 2.5, torch.arange(9) + 7.0])

TWO_SIDED = ("leaky_rerope", "rerope", "self_extend")


def made(method: str, *, original: Encoding | None = None, **options: Any) -> Encoding:
    original = create("rope", head_dim=8) if original is None else original
    chosen = {"factor": 1.3, "length": 8} | CASES[method][0] | options
    return extend(original, method, **chosen)


def draw(queries: int, keys: int | None = None, *, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = queries if keys is None else keys
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, heads, length, 8, generator=generator).double()
        for heads, length in ((4, queries), (2, keys), (2, keys))
    )


def by_loops(q: Tensor, k: Tensor, v: Tensor, grid: Grid, distance: Distance) -> Tensor:
    def logit(a: Tensor, b: Tensor, _: int, at: float, to: float) -> Tensor:
        by = distance(at, to)
        total = a.new_zeros(())
        for t in range(4):
            angle = by * 10000 ** (-2 * t / 8)
            turned = complex(a[t], a[t + 4]) * complex(math.cos(angle), math.sin(angle))
            total = total + (turned * complex(b[t], b[t + 4]).conjugate()).real
        return total * 8**-0.5

    return attention_by_loops(q, k, v, grid, logit=logit)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


GRIDS = {
    "whole": Grid.of(Layout.sequence(23), causal=True),
    "chunk": Grid(Layout.sequence(5, start=18), Layout.sequence(23), causal=True),
    "packed": Grid.of(Layout.packed([9, 14]), causal=True),
    "padded": Grid.of(Layout.padded([23, 11], side="left"), causal=True),
    "irregular": Grid.of(Layout.at(IRREGULAR), causal=True),
    "window": Grid.of(Layout.sequence(23), causal=True, window=9),
}


@pytest.mark.parametrize(("method", "grid"), in_turn(3, list(CASES), GRIDS))
def test_equals_loops(method: str, grid: Grid) -> None:
    rows = max(grid.query.batch, grid.key.batch)
    q, k, v = draw(grid.query.length, grid.key.length, rows=rows)
    expected = by_loops(q, k, v, grid, CASES[method][1])
    same(attend(q, k, v, grid, made(method), backend="reference"), expected)


@pytest.mark.parametrize("local", [1, 3, 4, 5])
def test_chunks_of_any_size_equal_loops(local: int) -> None:
    """With much that is local, two chunks are shorter than the largest distance."""
    grid, (q, k, v) = GRIDS["whole"], draw(23)
    expected = by_loops(q, k, v, grid, partial(chunked, local=local))
    same(attend(q, k, v, grid, made("dual_chunk", local=local)), expected)


@pytest.mark.parametrize("method", CASES)
def test_positions_below_zero(method: str) -> None:
    grid = Grid.of(Layout.sequence(12, start=-7), causal=True)
    q, k, v = draw(12, rows=1)
    expected = by_loops(q, k, v, grid, CASES[method][1])
    for backend in ("reference", "native"):
        same(attend(q, k, v, grid, made(method), backend=backend), expected)


@pytest.mark.parametrize("method", TWO_SIDED)
def test_both_sides(method: str) -> None:
    grid = Grid.of(Layout.sequence(23))
    q, k, v = draw(23)
    same(attend(q, k, v, grid, made(method)), by_loops(q, k, v, grid, CASES[method][1]))


@pytest.mark.parametrize("method", sorted(set(CASES) - set(TWO_SIDED)))
def test_one_sided_methods_say_so(method: str) -> None:
    q, k, v = draw(5)
    with pytest.raises(ArgumentError, match="causal=True"):
        attend(q, k, v, Grid.of(Layout.sequence(5)), made(method))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("self_extend", {"group": 1}),
        ("self_extend", {"window": 8, "length": 23, "group": 1}),
        ("rerope", {"window": 23, "length": 23}),
        ("leaky_rerope", {"leak": 1}),
        ("dual_chunk", {"reach": 24, "local": 1, "length": 25}),
        ("string", {"shift": 23, "local": 2, "length": 23, "factor": 1}),
    ],
)
def test_identities(method: str, options: dict[str, Any]) -> None:
    """Group 1, a window or chunk as long as the text, and no leak are RoPE itself."""
    grid = Grid.of(Layout.sequence(23), causal=True)
    q, k, v = draw(23)
    plain = attend(q, k, v, grid, create("rope", head_dim=8))
    same(attend(q, k, v, grid, made(method, **options)), plain)


@pytest.mark.parametrize("method", CASES)
def test_no_distance_is_longer_than_in_training(method: str) -> None:
    """With default options, at the factor asked for."""
    factor = 1.5 if method == "string" else 4
    encoding = extend(create("rope", head_dim=8), method, factor=factor, length=64)
    score = encoding.score
    assert isinstance(score, BandedRope)
    grid = Grid.of(Layout.sequence(int(factor * 64)), causal=True)
    longest, band_of = 0.0, score.band_of(grid).masked_fill(~grid.visible[:, 0], -1)
    for band, (query, key) in enumerate(score.moved(grid)):
        apart = query.unsqueeze(2) - (0 if key is None else key.unsqueeze(1))
        pairs = band_of == band
        longest = max(longest, apart.expand_as(pairs)[pairs].max().item())
    assert longest <= 64


@pytest.mark.parametrize("method", CASES)
def test_on_a_stretched_rope(method: str) -> None:
    """A Llama 3.1 rope is stretched already, and has a window all the same."""
    original = extend(create("rope", head_dim=8), "yarn", factor=2, length=8, alpha=0.1, beta=1)
    encoding = made(method, original=original)
    q, k, v = draw(4)
    grid = Grid.of(Layout.sequence(4), causal=True)
    same(attend(q, k, v, grid, encoding), attend(q, k, v, grid, original))


@pytest.mark.parametrize("method", CASES)
def test_no_bias_of_queries_by_keys(method: str) -> None:
    q, k, v = draw(23)
    grid = Grid.of(Layout.sequence(23), causal=True)
    told = explain(q, k, v, grid, made(method), backend="blockwise")
    assert "memory linear" in told.how


@pytest.mark.parametrize("method", CASES)
def test_a_score_part_is_in_the_way(method: str) -> None:
    both = create("rope", head_dim=8) + create("alibi", heads=4)
    with pytest.raises(NotApplicable, match="without a score part"):
        made(method, original=both)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rerope", {"window": 9}, "window: expected 1 to 8"),
        ("rerope", {"window": 0}, "window"),
        ("leaky_rerope", {"leak": 0.5}, "leak"),
        ("self_extend", {"group": 0}, "group"),
        ("self_extend", {"group": 1.5}, "group"),
        ("dual_chunk", {"reach": 8}, "reach"),
        ("dual_chunk", {"local": 6}, "reach"),
        ("string", {"factor": 3}, "at most doubles"),
        ("string", {"shift": 9}, r"from 5, what 1.3 times .* \(local=2\), to 8, .* got 9"),
        ("string", {"shift": 4}, "shift: expected from 5, .* got 4"),
        ("string", {"shift": 2, "factor": 1}, "from 3, more than local .* got 2"),
        ("string", {"local": 6}, "factor: expected at most 1.25, .* local=6, got 1.3"),
        ("string", {"local": 8}, "local: expected from 1 to 7"),
    ],
)
def test_bad_arguments(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(method, **options)


def test_groups_are_the_smallest_that_serve_the_length() -> None:
    # Of 192 tokens 16 are near, and 176 are to count as 48: groups of 11/3 or more.
    part = made("self_extend", factor=3, length=64, window=16, group=None).score
    assert isinstance(part, SelfExtend)
    assert part.group == 4


def test_string_scales_logits_by_the_square_of_its_temperature() -> None:
    grid = Grid.of(Layout.sequence(20), causal=True)
    q, k, _ = draw(20)
    k = k.repeat_interleave(2, dim=1)
    plain, warm = made("string").score, made("string", temperature=1.3).score
    assert plain is not None
    assert warm is not None
    torch.testing.assert_close(
        warm(q, k, grid, scale=1.0), 1.69 * plain(q, k, grid, scale=1.0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("method", CASES)
def test_a_gain_is_of_queries_and_of_keys(method: str) -> None:
    loud = made(method, original=create("rope", head_dim=8, gain=1.3))
    grid = Grid.of(Layout.sequence(23), causal=True)
    q, k, v = draw(23)
    same(attend(q, k, v, grid, loud, scale=1.0), attend(q, k, v, grid, made(method), scale=1.69))
