"""Dynamic NTK and LongRoPE: how they depend on the length, per row, under a cache, at L."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout, attend, create
from posenc.attention import LayerCache
from posenc.encodings.query_key.rope import Rope
from posenc.extension import extend
from posenc.grid import seen_lengths

L = 8
LONG, SHORT = (1.0, 2.0, 3.0, 4.0), (1.0, 1.1, 1.2, 1.3)


def made(method: str) -> Encoding:
    options: dict[str, Any] = {}
    if method == "longrope":
        options = {"long_factors": LONG, "short_factors": SHORT}
    return extend(create("rope", head_dim=8), method, factor=3, length=L, **options)


def fixed(method: str, length: int) -> Encoding:
    """The rope that a text of this length should see, as one whose frequencies never change."""
    rope = Rope(head_dim=8)
    if method == "longrope":
        gain = made(method).query_key.gain  # type: ignore[union-attr]
        return Encoding.of(rope.stretched(LONG if length > L else SHORT, gain=gain))
    by = 3 * max(length, L) / L - 2
    return Encoding.of(rope.stretched([by ** (t / 3) for t in range(4)]))


def tokens(length: int, *, rows: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 2, length, 8)
    return tuple(torch.randn(shape, generator=generator).double() for _ in range(3))  # type: ignore[return-value]


def read(encoding: Encoding, layout: Layout, *, rows: int = 1, seed: int = 0) -> Tensor:
    q, k, v = tokens(layout.length, rows=rows, seed=seed)
    return attend(q, k, v, Grid.of(layout, causal=True), encoding)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


both = pytest.mark.parametrize("method", ["dynamic_ntk", "longrope"])


@both
@pytest.mark.parametrize("length", [1, L - 1, L, L + 1, 2 * L, 5 * L])
def test_each_length_has_its_own_frequencies(method: str, length: int) -> None:
    """unsloth #10681: off by one at the boundary. L tokens are short, L + 1 are long."""
    layout = Layout.sequence(length)
    same(read(made(method), layout), read(fixed(method, length), layout))


@both
def test_the_boundary_is_past_the_trained_length(method: str) -> None:
    q, k, _ = tokens(L)
    transform, rope = made(method).query_key, fixed(method, L + 1).query_key
    assert transform is not None
    assert rope is not None
    at = transform(q, k, Grid.of(Layout.sequence(L)))[0]
    past = transform(q, k, Grid(Layout.sequence(L), Layout.sequence(L, start=1)))[0]
    assert not torch.allclose(at, past, atol=1e-3)
    same(past, rope(q, k, Grid.of(Layout.sequence(L)))[0])


@both
def test_a_short_text_after_a_long_one_is_as_if_it_came_first(method: str) -> None:
    """transformers #27227: frequencies of a long text stay for the next."""
    encoding = made(method)
    first = read(encoding, Layout.sequence(L))
    read(encoding, Layout.sequence(5 * L))
    torch.testing.assert_close(read(encoding, Layout.sequence(L)), first)


@both
def test_cached_keys_are_turned_anew(method: str) -> None:
    """transformers #25104: keys cached at one length, queries at another.

    A token at a time, each is what the last query of one pass over all so far is.
    """
    encoding, cache = made(method), LayerCache()
    q, k, v = tokens(2 * L + 3)
    for n in range(2 * L + 3):
        here = Layout.sequence(1, start=n)
        keys, values, layout = cache.append(k[:, :, n : n + 1], v[:, :, n : n + 1], here)
        grid = Grid(here, layout, causal=True)
        got = attend(q[:, :, n : n + 1], keys, values, grid, encoding)
        so_far = read_first(fixed(method, n + 1), n + 1)
        same(got[:, :, 0], so_far[:, :, -1])


def read_first(encoding: Encoding, length: int) -> Tensor:
    q, k, v = (x[:, :, :length] for x in tokens(2 * L + 3))
    return attend(q, k, v, Grid.of(Layout.sequence(length), causal=True), encoding)


@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_row_does_not_change_a_short_one(method: str, side: str) -> None:
    """Mixed batches: each row is as it is alone."""
    lengths = [3 * L, L, L + 1, 2]
    layout = Layout.padded(lengths, side=side)
    q, k, v = tokens(3 * L, rows=4)
    got = attend(q, k, v, Grid.of(layout, causal=True), made(method))
    for row, length in enumerate(lengths):
        real = slice(3 * L - length, None) if side == "left" else slice(0, length)
        alone = [x[row : row + 1, :, real] for x in (q, k, v)]
        grid = Grid.of(Layout.sequence(length), causal=True)
        expected = attend(alone[0], alone[1], alone[2], grid, fixed(method, length))
        same(got[row : row + 1, :, real], expected)


@both
def test_documents_have_their_own_lengths(method: str) -> None:
    lengths = [L - 2, 2 * L, L]
    q, k, v = tokens(sum(lengths))
    got = attend(q, k, v, Grid.of(Layout.packed(lengths), causal=True), made(method))
    begin = 0
    for length in lengths:
        part = [x[:, :, begin : begin + length] for x in (q, k, v)]
        grid = Grid.of(Layout.sequence(length), causal=True)
        expected = attend(part[0], part[1], part[2], grid, fixed(method, length))
        same(got[:, :, begin : begin + length], expected)
        begin += length


def test_lengths_by_hand() -> None:
    packed = Layout.packed([3, 5])
    query, key = seen_lengths(Grid.of(packed))
    assert key.tolist() == [[3, 3, 3, 5, 5, 5, 5, 5]]
    assert torch.equal(query, key)
    padded = Layout.padded([2, 4])
    assert seen_lengths(Grid.of(padded))[0].tolist() == [[2], [4]]


def test_lengths_of_documents_in_any_order() -> None:
    key = Layout(
        torch.tensor([[7.0, 1.0, 2.0, 9.0]]).unsqueeze(-1),
        torch.arange(4).unsqueeze(0),
        document=torch.tensor([[5, -1, 5, 2]]),
        valid=torch.tensor([[True, True, True, False]]),
    )
    query = Layout(
        torch.zeros(1, 4, 1), torch.arange(4).unsqueeze(0), document=torch.tensor([[-1, 5, 2, 3]])
    )
    lengths, own = seen_lengths(Grid(query, key))
    assert lengths.tolist() == [[2, 8, -torch.inf, -torch.inf]]
    assert own.tolist() == [[8, 2, 8, -torch.inf]]


@pytest.mark.parametrize("padded", [False, True])
def test_special_tokens_do_not_count(padded: bool) -> None:
    layout = Layout(
        torch.tensor([[90.0, 0.0, 1.0, 70.0 if padded else 1.0]]).unsqueeze(-1),
        torch.arange(4).unsqueeze(0),
        valid=torch.tensor([[True, True, True, False]]) if padded else None,
        special=torch.tensor([[True, False, False, False]]),
    )
    assert seen_lengths(Grid.of(layout))[0].tolist() == [[2]]
