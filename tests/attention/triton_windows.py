"""Windows of the Triton kernels, interpreted, against loops. ``test_triton.py`` runs this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from posenc.attention.backends.triton.kernels.visibility import philox
from posenc.attention.backends.triton.kernels.windows import (
    paired_biases,
    roll_x,
    roll_y,
    single_biases,
    unroll_x,
    unroll_y,
)


@triton.jit
def rolled(tile_ptr, window_ptr, back_ptr, block: tl.constexpr, for_keys: tl.constexpr):
    at = tl.arange(0, block)[:, None] * block + tl.arange(0, block)[None, :]
    wide = tl.arange(0, block)[:, None] * 2 * block + tl.arange(0, 2 * block)[None, :]
    window = roll_x(tl.load(tile_ptr + at), for_keys)
    tl.store(window_ptr + wide, window)
    first, second = tl.split(tl.permute(tl.reshape(window, [block, 2, block]), (0, 2, 1)))
    tl.store(back_ptr + at, unroll_x(first, second, for_keys))


@triton.jit
def rolled_across(tile_ptr, window_ptr, back_ptr, block: tl.constexpr, for_keys: tl.constexpr):
    at = tl.arange(0, block)[:, None] * block + tl.arange(0, block)[None, :]
    high = tl.arange(0, 2 * block)[:, None] * block + tl.arange(0, block)[None, :]
    window = roll_y(tl.load(tile_ptr + at), for_keys)
    tl.store(window_ptr + high, window)
    tl.store(back_ptr + at, unroll_y(window, for_keys))


@triton.jit
def biases(
    table_ptr,
    pairs_ptr,
    singles_ptr,
    factor,
    start,
    count,
    block_x: tl.constexpr,
    block_y: tl.constexpr,
    for_keys: tl.constexpr,
    twice: tl.constexpr,
):
    at = tl.arange(0, block_x)[:, None] * block_y + tl.arange(0, block_y)[None, :]
    pairs = paired_biases(table_ptr, factor, start, count, block_x, block_y, for_keys, twice)
    tl.store(pairs_ptr + at, pairs)
    singles = single_biases(table_ptr, factor, start, count, block_x, block_y, for_keys)
    tl.store(singles_ptr + at, singles)


@pytest.mark.parametrize("for_keys", [False, True])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("kernel", [rolled, rolled_across])
def test_tiles_are_rolled_into_windows_and_back(kernel: Any, block: int, for_keys: bool) -> None:
    tile, back = torch.randn(block, block), torch.empty(block, block)
    expected = torch.zeros(block, 2 * block)
    for x in range(block):
        for y in range(block):
            own = x if kernel is rolled else y
            expected[own, (x - y if for_keys else y - x) + block - 1] = tile[x, y]
    if kernel is rolled_across:
        expected = expected.T
    window = torch.empty(expected.shape)
    kernel[(1,)](tile, window, back, block, for_keys)
    assert torch.equal(window, expected)
    assert torch.equal(back, tile)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("for_keys", [False, True])
@pytest.mark.parametrize("start", [-40, -9, 0, 3, 50])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 64)])
def test_biases_are_those_of_the_pairs(
    blocks: tuple[int, int], start: int, for_keys: bool, twice: bool
) -> None:
    count = 37
    table, pairs, singles = torch.randn(count), torch.empty(blocks), torch.empty(blocks)
    biases[(1,)](table, pairs, singles, 0.7, start, count, *blocks, for_keys, twice)
    x, y = torch.arange(blocks[0])[:, None], torch.arange(blocks[1])
    entry = (x - y + blocks[1] - 1 if for_keys else y - x + blocks[0] - 1) + start
    expected = table[entry.clamp(0, count - 1)] * 0.7
    torch.testing.assert_close(pairs, expected)
    assert torch.equal(pairs, singles)


@triton.jit
def drawn(words_ptr, others_ptr, seed_ptr, count: tl.constexpr):
    at, seed = tl.arange(0, count), tl.load(seed_ptr)
    words = philox(seed, at, 3 * at + 1, 7 - at)
    others = tl.philox(seed, at, 3 * at + 1, 7 - at, tl.zeros_like(at), n_rounds=7)
    for number in tl.static_range(4):
        tl.store(words_ptr + number * count + at, words[number].to(tl.int64))
        tl.store(others_ptr + number * count + at, others[number].to(tl.int64))


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 2, 2**40 + 3])
def test_words_are_drawn_as_triton_draws_them(seed: int) -> None:
    words, others = torch.zeros(2, 4, 32, dtype=torch.int64)
    drawn[(1,)](words, others, torch.tensor([seed]), 32)
    assert words.any()
    assert torch.equal(words, others)


@triton.jit
def summed(numbers_ptr, results_ptr, more, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(results_ptr + at, tl.load(numbers_ptr + at) + more)


def test_integers_beyond_their_type_are_errors() -> None:
    """Also of operands of types that were met before."""
    numbers, results = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    for _ in range(3):
        summed[(1,)](numbers, results, 2**31 - 8, 8)
        assert torch.equal(results, numbers + (2**31 - 8))
        with pytest.raises(InterpreterError, match="overflow"):
            summed[(1,)](numbers, results, 2**31 - 7, 8)


@triton.jit
def mixed(wide_ptr, narrow_ptr, results_ptr, count: tl.constexpr):
    at = tl.arange(0, count)
    wide, narrow = tl.load(wide_ptr + at), tl.load(narrow_ptr + at)
    results = wide * narrow - 3 + tl.where(wide > narrow, at, at // 3)
    tl.store(results_ptr + at, results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_operands_of_two_types_are_promoted(dtype: torch.dtype) -> None:
    wide = torch.randn(16)
    narrow = torch.arange(-8, 8).to(dtype)
    for shift in (0.0, 1.0):
        results = torch.empty(16)
        mixed[(1,)](wide + shift, narrow, results, 16)
        at = torch.arange(16)
        expected = (wide + shift) * narrow.float() - 3
        expected += torch.where(wide + shift > narrow.float(), at, at // 3)
        torch.testing.assert_close(results, expected)
