"""The arguments of a kernel, gathered from tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from posenc.attention.backends.native.library import PAD, Map, Problem, RotaryFactors, Tokens
from posenc.attention.backends.native.pairs import set_pairs
from posenc.attention.spans import Spans, spans_of

PARTS, ITEMS = 32, 8
"""Sums of gradients over the batch and over blocks of queries at most, so that many threads have
work. They depend on the shape alone: results are the same for any number of threads."""


class KernelCall:
    """The arguments of a kernel, and all tensors that they point to."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_factor: Tensor | None,
        k_factor: Tensor | None,
        line: Tensor | None,
        column: Tensor | None,
        bucket: Tensor | None,
        intervals: Tensor | None,
        scale: float,
        place: Sequence[int],
        dropout: float,
        seed: int,
    ) -> None:
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self._kept: list[Tensor] = []
        self.spans: Spans | None = None
        self.pairs: list[Tensor] = []
        self.problem = x = Problem()
        (x.batch, x.heads, x.queries, x.dim), (x.groups, x.keys) = q.shape, k.shape[1:3]
        x.value_dim, x.scale, x.dropout, x.seed = v.shape[-1], scale, dropout, seed
        x.q, x.k, x.v = (Tokens.of(self.keep(contiguous_rows(t))) for t in (q, k, v))
        x.chunks = min(x.batch, ceil_div(PARTS, x.heads))
        self.tiles = ceil_div(x.queries, 256)
        shift, lowest, highest, first, period, jump, most, x.adjacent = place
        self.splits = min(ceil_div(ITEMS, x.heads * x.chunks), self.tiles, most)
        if intervals is None:
            intervals = regular_intervals(x.queries, x.keys, shift, (lowest, highest), period, jump)
        self.keep(intervals)
        x.low, x.high, x.base = (part.data_ptr() for part in intervals)
        x.rows_batch = 0 if intervals.shape[1] == 1 else x.queries
        x.period, x.jump = period, jump
        if q_factor is not None and k_factor is not None:
            x.rank = q_factor.shape[-1]
            x.q_factor, x.k_factor = (
                Tokens.of(self.keep(contiguous_rows(t))) for t in (q_factor, k_factor)
            )
        if line is not None:
            line = self.keep(line.to(self.dtype).contiguous())
            x.bias_by_offset, x.bias_by_offset_first = line.data_ptr(), first
            x.bias_by_offset_count = line.shape[1]
            x.bias_by_offset_head = 0 if len(line) == 1 else line.shape[1]
        if column is not None:
            column = self.keep(column.to(torch.float64).contiguous())
            x.column, x.column_head = column.data_ptr(), column.stride(1)
            x.column_batch = 0 if len(column) == 1 else column.stride(0)
        if bucket is not None:
            self.spans = spans = spans_of(bucket)
            numbers = _padded(spans)
            x.map = Map(
                numbers.data_ptr() + 4 * PAD,
                spans.span_of.data_ptr(),
                spans.spans.data_ptr(),
                first,
                len(bucket),
                len(spans.buckets),
                first + spans.varying[0],
                first + spans.varying[1],
            )

    def keep(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        return x

    def add_terms(
        self,
        left: Tensor | None,
        left_rows: Tensor | None,
        right: Tensor | None,
        right_rows: Tensor | None,
        value_rows: Tensor | None,
    ) -> None:
        x = self.problem
        for term, tokens, own, rows in (
            (x.left, left, x.q, left_rows),
            (x.right, right, x.k, right_rows),
        ):
            if rows is not None:
                rows = self._read(rows)
                term.tokens = (
                    own if tokens is None else Tokens.of(self.keep(contiguous_rows(tokens)))
                )
                term.rows, term.features = rows.data_ptr(), rows.shape[-1]
                term.rows_head = 0 if len(rows) == 1 else rows.stride(0)
                x.map.buckets = rows.shape[1]
        if value_rows is not None:
            rows = self._read(value_rows)
            x.value_rows, x.value_head = rows.data_ptr(), 0 if len(rows) == 1 else rows.stride(0)

    def add_rotary(self, rotary: Sequence[Tensor]) -> None:
        """Cosines and sines of queries and of keys, if any."""
        if rotary:
            kept = [self.keep(factor.contiguous()) for factor in rotary]
            x = self.problem
            x.rotated, x.q_rotary, x.k_rotary = (
                kept[0].shape[-1],
                RotaryFactors.of(*kept[:2]),
                RotaryFactors.of(*kept[2:]),
            )

    def add_pairs(self, kind: str, pairs: Sequence[Tensor]) -> None:
        if kind == "mixing":  # all heads go together
            self.splits = 1
        self.pairs = [self.keep(x.to(self.dtype).contiguous()) for x in pairs]
        set_pairs(kind, self.problem, self.pairs)

    def _read(self, rows: Tensor) -> Tensor:
        """The rows of the buckets that the offsets meet, in their order; all, without a map."""
        rows = rows.to(self.dtype)
        if self.spans is not None and not is_whole(self.spans, rows):
            rows = rows[:, self.spans.buckets]
        return self.keep(rows.contiguous())


def is_whole(spans: Spans, rows: Tensor) -> bool:
    return spans.whole and len(spans.buckets) == rows.shape[1]


def contiguous_rows(x: Tensor) -> Tensor:
    """``x`` with contiguous features."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=64)
def _padded(spans: Spans) -> Tensor:
    number = spans.number
    return torch.cat([number[:1].expand(PAD), number, number[-1:].expand(PAD)])


@lru_cache(maxsize=64)
def regular_intervals(
    queries: int, keys: int, shift: int, band: tuple[int, int], period: int, jump: int
) -> Tensor:
    """Intervals of a regular grid, or of whole images that see each other (``period`` > 0)."""
    i = torch.arange(queries)
    if period:
        columns = period + jump  # offsets along an image row: queries' and keys' columns less one
        width = columns + 1 - period
        base = -(i // width) * columns - i % width + shift
        low, high = torch.zeros_like(i), torch.full_like(i, keys)
    else:
        base = shift - i
        low, high = (band[0] - base).clamp(0, keys), (band[1] + 1 - base).clamp(0, keys)
    return torch.stack([low, high, base]).unsqueeze(1).to(torch.int32)
