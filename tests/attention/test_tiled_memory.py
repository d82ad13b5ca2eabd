"""Buffers that the tiled backend keeps for its next call, and the layout of a tile in memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout, attend
from posenc.attention.backends.tiled.memory import Memory, Skewed, kept_bytes, release


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=generator, dtype=torch.float64)
    return q, k, v


def test_memory_is_kept_until_it_is_released() -> None:
    grid, encoding = Grid.of(Layout.sequence(300)), posenc.create("t5", heads=2).double()
    release()
    attend(*draw(), grid, encoding, backend="tiled").sum().backward()
    first = Memory("logits", torch.empty(0, dtype=torch.float64)).of(10)
    again = Memory("logits", torch.empty(0, dtype=torch.float64)).of(10)
    assert first.data_ptr() == again.data_ptr()
    assert kept_bytes() > 80
    release()
    assert kept_bytes() == 0


def test_memory_of_a_thread_goes_when_it_ends() -> None:
    grid, encoding = Grid.of(Layout.sequence(300)), posenc.create("shaw", head_dim=8).double()
    q, k, v = draw()
    during: list[int] = []

    def work() -> None:
        attend(q, k, v, grid, encoding.requires_grad_(False), backend="tiled")
        during.append(kept_bytes())

    release()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # no workers, whose threads stay
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads)
    assert during[0] > 0
    assert kept_bytes() == 0


def test_a_product_in_the_skewed_reading_is_shifted_row_by_row() -> None:
    """Two queries, three keys, worked by hand: row r of the product moves r places to the left."""
    memory = Skewed("by hand", torch.empty(0))
    memory.memory.of(8).fill_(torch.nan)
    tile, whole = memory.of(1, 2, 3)
    whole.copy_(torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]]))
    assert tile.tolist() == [[[1, 2, 3], [6, 7, 8]]]
    for rows, columns, sums in ((2, 3, [1, 6, 8, 6]), (1, 2, [1, 2]), (2, 3, [1, 6, 8, 6])):
        tile, whole = memory.of(1, rows, columns, cleared=True)
        tile.copy_(torch.tensor([[[1.0, 2, 3], [4, 5, 6]]])[:, :rows, :columns])
        assert whole.sum(1).tolist() == [sums]
