"""Memory of tiles.

A tile of R queries and C keys lives in R rows of W = R + C - 1 numbers, one an offset: element
(r, j) is in row r at the place r + j of its offset. So a product of queries with the vectors of all
W offsets is written row by row where it belongs, and a sum over the rows is a sum along diagonals;
no element is moved. Sums see the whole rows, whose other elements have to be zero.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.views import strided_view

_Key = tuple[str, torch.dtype, torch.device]

KEPT = 2**22
"""Numbers that each of the few memories of a thread keeps for the next call at most. New memory is
slow to touch: at 1024 tokens it took an eighth of all the time."""


class _Memories:
    """The memories of one thread, which go when it ends."""

    def __init__(self) -> None:
        self.by_key: dict[_Key, Tensor] = {}


class _Kept(threading.local):
    """The memories of each thread."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    every: ClassVar[weakref.WeakSet[_Memories]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.memories = _Memories()
        with self.lock:
            self.every.add(self.memories)

    @classmethod
    def of_all_threads(cls) -> list[_Memories]:
        """Those of all threads that have not ended."""
        with cls.lock:
            return list(cls.every)


_kept = _Kept()


def kept_bytes() -> int:
    """Bytes that all threads keep for their next calls."""
    memories = _Kept.of_all_threads()
    return sum(x.nbytes for each in memories for x in list(each.by_key.values()))


def release() -> None:
    """Give back what all threads keep; safe at any time, since those at work hold theirs."""
    for memories in _Kept.of_all_threads():
        memories.by_key.clear()


class Memory:
    """Memory that is used again and again, in this call and by the thread's next.

    Args:
        name: which; two of one name are one.
        like: a tensor of the dtype and device that is wanted.
    """

    def __init__(self, name: str, like: Tensor) -> None:
        self.key, self.like = (name, like.dtype, like.device), like
        self.numbers = _kept.memories.by_key.get(self.key)

    def of(self, *size: int) -> Tensor:
        """The beginning of it in this shape, with anything in it."""
        count = math.prod(size)
        if self.numbers is None or self.numbers.numel() < count:
            with torch.inference_mode(False):
                self.numbers = self.like.new_empty(count)
            if count <= KEPT and self.like.device.type == "cpu":
                _kept.memories.by_key[self.key] = self.numbers
        return self.numbers[:count].view(size)


class Skewed:
    """Memory for one tile a head, read in its two ways."""

    def __init__(self, name: str, like: Tensor) -> None:
        self.memory = Memory(name, like)
        self.cleared: tuple[int, ...] | None = None

    def of(
        self, heads: int, rows: int, columns: int, *, cleared: bool = False
    ) -> tuple[Float[Tensor, "H R C"], Float[Tensor, "H R R+C-1"]]:
        """The tile, element (r, j), and whole rows, in which that is at (r, r + j).

        What is in the tile stays, if it was asked for before in the same size.

        Args:
            cleared: all else in the rows is zero. If not, anything may be written there.
        """
        width = rows + columns - 1
        whole = self.memory.of(heads, rows, width)
        strides = (rows * width, width + 1, 1)
        if cleared and self.cleared != whole.shape:
            strided_view(whole, (heads, rows - 1, rows), strides, columns).zero_()
        self.cleared = whole.shape if cleared else None
        return strided_view(whole, (heads, rows, columns), strides), whole


def add_product(
    out: Float[Tensor, "H N F"],
    left: Float[Tensor, "H N M"],
    right: Float[Tensor, "H M F"],
    room: Memory,
) -> None:
    """``out += left @ right``, all heads in one call, which in place needs one piece of memory."""
    if out.is_contiguous():
        out.baddbmm_(left, right)
    else:
        out += torch.bmm(left, right, out=room.of(*out.shape))
