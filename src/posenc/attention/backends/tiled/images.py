"""Attention over whole images in blocks of rows, with a table by offset, as operators.

With queries from the last cell to the first, a pair reads the table at row ``r_y + y`` and column
``r_x + x``: a block of it is a view with four strides, from which the bias of some image rows of
queries is copied, a block at a time. The gradient of the table is summed along columns in a copy
with a gap after each image row, read with a stride one less, and along rows slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.tiled.memory import Memory
from posenc.attention.backends.tiled.sdpa_cpu import (
    Partial,
    join,
    sdpa_cpu_backward,
    sdpa_cpu_forward,
)
from posenc.attention.backends.tiled.workers import side_by_side
from posenc.attention.views import strided_view

TILE = (256, 2048)
"""Queries and keys, about, of a piece of the bias."""

LANES = 4
"""Heads at a time at most on one core."""

FEW = 2**24
"""Logits in all up to which all cores share each operator: to wake a thread would take longer."""


class _Image:
    """Some heads of one batch row.

    Args:
        q: ``[1, H, Q, D]`` reversed and scaled; k: ``[1, H, K, D]``; v: ``[1, H, K, E]``.
        table: ``[H, Y, X]``, contiguous.
        extents: rows and columns of the queries' image, then of the keys'.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, extents: Sequence[int]
    ) -> None:
        self.q, self.k, self.v, self.table = q, k, v, table
        self.rows, self.columns, self.key_rows, self.key_columns = extents
        self.heads = q.shape[1]
        self.memory = Memory("logits", q)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The image rows of queries, a tile's at a time."""
        return _ranges(self.rows, TILE[0], self.columns)

    def key_ranges(self) -> Iterator[tuple[int, int]]:
        """The image rows of keys, a tile's at a time."""
        return _ranges(self.key_rows, TILE[1], self.key_columns)

    def bias(self, begin: int, end: int, low: int, high: int) -> Float[Tensor, "H R C"]:
        """Bias of rows of queries (from the last) and rows of keys, until the next call."""
        size = (self.heads, end - begin, self.columns, high - low, self.key_columns)
        _, height, row = self.table.shape
        strides = (height * row, row, 1, row, 1)
        view = strided_view(self.table, size, strides, (begin + low) * row)
        written = self.memory.of(*size).copy_(view)
        return written.view(self.heads, size[1] * size[2], size[3] * size[4])

    def forward(self, into: Partial) -> None:
        """Write the output and LSE of all queries."""
        for begin, end in self.blocks():
            at = slice(begin * self.columns, end * self.columns)
            parts = []
            for low, high in self.key_ranges():
                to = slice(low * self.key_columns, high * self.key_columns)
                mask = self.bias(begin, end, low, high).unsqueeze(0)
                q, k, v = self.q[:, :, at], self.k[:, :, to], self.v[:, :, to]
                parts.append(sdpa_cpu_forward(q, k, v, mask))
            whole = join(parts)
            into.output[:, :, at], into.lse[:, :, at] = whole.output, whole.lse

    def backward(
        self, whole: Partial, gradient: Tensor, into: Sequence[Tensor], *, table: bool
    ) -> None:
        """Add the gradients of q, k, v and, if wanted, of the table to ``into``."""
        if table:
            self._own_backward(whole, gradient, into)
            return
        for begin, end in self.blocks():
            at = slice(begin * self.columns, end * self.columns)
            part = Partial(whole.output[:, :, at], whole.lse[:, :, at])
            for low, high in self.key_ranges():
                to = slice(low * self.key_columns, high * self.key_columns)
                mask = self.bias(begin, end, low, high).unsqueeze(0)
                q, k, v = self.q[:, :, at], self.k[:, :, to], self.v[:, :, to]
                found = sdpa_cpu_backward(gradient[:, :, at], q, k, v, part, mask)
                for gathered, place, each in zip(into, (at, to, to), found, strict=False):
                    gathered[:, :, place] += each

    def _own_backward(self, whole: Partial, gradient: Tensor, into: Sequence[Tensor]) -> None:
        delta = (gradient * whole.output).sum(-1, keepdim=True)  # [1, H, Q, 1]
        queries = torch.cat([self.q, -whole.lse.unsqueeze(-1)], dim=-1)[0]  # [H, Q, D + 1]
        gradients = torch.cat([gradient, -delta], dim=-1)[0]  # [H, Q, E + 1]
        keys, values = (torch.nn.functional.pad(x, (0, 1), value=1.0)[0] for x in (self.k, self.v))
        q, k, plain = self.q[0], self.k[0], gradient[0]
        room, sums = Memory("ds", q), _TableSums(self)
        for begin, end in self.blocks():
            at = slice(begin * self.columns, end * self.columns)
            for low, high in self.key_ranges():
                to = slice(low * self.key_columns, high * self.key_columns)
                weights = self.bias(begin, end, low, high)  # [H, R, C]
                weights.baddbmm_(queries[:, at], keys[:, to].mT).exp_()
                ds = room.of(*weights.shape)  # [H, R, C]
                ds.baddbmm_(gradients[:, at], values[:, to].mT, beta=0.0).mul_(weights)
                into[2][0, :, to].baddbmm_(weights.mT, plain[:, at])
                into[0][0, :, at].baddbmm_(ds, k[:, to])
                into[1][0, :, to].baddbmm_(ds.mT, q[:, at])
                sums.add(ds, begin, end, low, high, into[3])


def _ranges(rows: int, tokens: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of image rows that hold at least so many tokens, but for the last."""
    step = -(-tokens // columns)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


class _TableSums:
    """Sums of what tiles hold over all pairs with the same offset."""

    def __init__(self, image: _Image) -> None:
        self.columns, self.key_columns = image.columns, image.key_columns
        self.width = self.columns + self.key_columns
        _, count = next(image.blocks())
        _, key_count = next(image.key_ranges())
        self.memory = image.q.new_zeros(image.heads, count, self.columns, key_count, self.width)

    def add(
        self, tile: Tensor, begin: int, end: int, low: int, high: int, into: Float[Tensor, "H Y X"]
    ) -> None:
        """Sum a tile of image rows ``begin`` to ``end`` of queries, ``low`` to ``high`` of keys."""
        count, key_count = end - begin, high - low
        part = self.memory[:, :count, :, :key_count]
        part[..., : self.key_columns] = tile.view(
            len(tile), count, self.columns, key_count, self.key_columns
        )
        head, row, column, key_row, _ = self.memory.stride()
        size = (len(tile), count, self.columns, key_count, self.width - 1)
        skewed = strided_view(self.memory, size, (head, row, column - 1, key_row, 1))
        if self.memory.shape[3] != key_count:
            # The end of a column's last row is not the gap before the next column's first.
            self.memory[:, :, :, key_count:] = 0
        sums = skewed.sum(2)
        for place in range(count):
            first = begin + place + low
            into[:, first : first + key_count] += sums[:, place]


@torch.library.custom_op("posenc::tiled_image", mutates_args=())
def tiled_image(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, extents: Sequence[int], table_wanted: bool
) -> tuple[Tensor, Tensor]:
    """Attention between whole images with a table of offsets: output and LSE.

    Args:
        q: ``[B, H, Q, D]``, reversed and scaled; k: ``[B, H, K, D]``; v: ``[B, H, K, D]``.
        table: ``[H, Y, X]``; extents: rows and columns of queries, then of keys.
        table_wanted: whether the gradient of the table will be wanted.
    """
    into, lines = Partial(torch.empty_like(q), q.new_empty(q.shape[:3])), table.contiguous()

    def work(heads: slice) -> None:
        for batch in range(q.shape[0]):
            row = slice(batch, batch + 1)
            image = _Image(q[row, heads], k[row, heads], v[row, heads], lines[heads], extents)
            image.forward(into.part(batch, (heads.start, heads.stop)))

    side_by_side(work, _lanes(q, k))
    return into.output, into.lse


def _lanes(q: Tensor, k: Tensor) -> list[slice]:
    """Heads that are done together, in all batch rows."""
    heads = q.shape[1]
    most = min(LANES, -(-heads // torch.get_num_threads()))
    if heads * q.shape[2] * k.shape[2] <= FEW:
        most = heads
    return [slice(begin, min(begin + most, heads)) for begin in range(0, heads, most)]


@tiled_image.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3])


@torch.library.custom_op("posenc::tiled_image_backward", mutates_args=())
def tiled_image_backward(
    gradient: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    extents: Sequence[int],
    table_wanted: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and of the table, which is zero where it is not wanted."""
    into = [torch.zeros_like(x) for x in (q, k, v, table)]
    whole, lines = Partial(output, lse), table.contiguous()

    def work(heads: slice) -> None:
        for batch in range(q.shape[0]):
            row = slice(batch, batch + 1)
            image = _Image(q[row, heads], k[row, heads], v[row, heads], lines[heads], extents)
            image.backward(
                whole.part(batch, (heads.start, heads.stop)),
                gradient[row, heads],
                [*(x[row, heads] for x in into[:3]), into[3][heads]],
                table=table_wanted,
            )

    side_by_side(work, _lanes(q, k))
    return into


@tiled_image_backward.register_fake
def _(gradient: Tensor, output: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in given[:4]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.rest = inputs[4:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors
    found = tiled_image_backward(gradient.contiguous(), *kept, *ctx.rest)
    return (*found[:3], found[3] if ctx.rest[1] else None, None, None)


tiled_image.register_autograd(kernel_gradients(_differentiate), setup_context=_keep)


class TiledImagePart(torch.autograd.Function):
    """``tiled_image`` with output and LSE over more keys given: only its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor, *inputs: Any) -> Tensor:
        """The given output; ``inputs`` are those of ``tiled_image``."""
        ctx.save_for_backward(output, lse, *inputs[:4])
        ctx.rest = inputs[4:]
        ctx.set_materialize_grads(False)
        return output.clone()

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *_differentiate(ctx, gradient, None)
