"""Spans of an offset-to-bucket map: stretches on which the bucket is constant or rises by one.

T5 has at most 32 of them, Shaw three, an unclipped table one. A kernel then reads the product of a
token with the rows of buckets by contiguous additions, one a span, instead of by a gather.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding.prepared import reused


@dataclass(frozen=True, eq=False)
class Spans:
    """A bucket map over consecutive offsets, its buckets numbered in the order they are met.

    A bucket that is left and met again has a number for each time, so that the number of an offset
    is that of the offset before it, or one more. Of images, along each image row: rows of offsets
    with the same buckets share their numbers, and no span goes on from one to the next.

    Args:
        buckets: ``[N]`` int64, the map's own bucket of each number.
        number: ``[W]`` int32, the number of each offset.
        spans: ``[S, 4]`` int32: the first and the last offset (0 … W - 1), the first's number, and
            the step, 1 where the number rises with the offset and 0 where it is constant.
        span_of: ``[W]`` int32, the span of each offset.
        consecutive: whether ``buckets`` are n, n + 1, …, n + N - 1.
        varying: from and to (exclusive) of the offsets between the constant spans at the two ends;
            all of them of images.
    """

    buckets: Int[Tensor, "N"]
    number: Int[Tensor, "W"]
    spans: Int[Tensor, "S 4"]
    span_of: Int[Tensor, "W"]
    consecutive: bool
    varying: tuple[int, int]

    def rows_of(self, table: Float[Tensor, "h rows D"]) -> Float[Tensor, "h N D"]:
        """Rows of a table by bucket; no copy where the buckets are consecutive."""
        if not self.consecutive:
            return table[:, self.buckets]
        first = int(self.buckets[0])
        return table[:, first : first + len(self.buckets)]


def spans_of(bucket: Int[Tensor, "W"], columns: int | None = None) -> Spans:
    """Spans of the buckets of W consecutive offsets.

    Args:
        columns: of images, offsets along an image row.
    """
    bucket = bucket.detach().to("cpu", torch.int64).contiguous()
    content = ctypes.string_at(bucket.data_ptr(), 8 * len(bucket))
    columns = columns or len(bucket)
    return reused(lambda: _spans(content, columns), "spans", content, columns)


def _spans(content: bytes, columns: int) -> Spans:
    bucket = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, columns)
    rows, row_of = torch.unique(bucket, dim=0, return_inverse=True)
    changes = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[:, 1:], rows[:, :-1], out=changes[:, 1:])
    number = (changes.flatten().cumsum(0) - 1).view_as(rows)[row_of].flatten()
    first = changes[row_of].flatten().nonzero().flatten()
    last = torch.cat([first[1:], torch.tensor([bucket.numel()])]) - 1
    single = first == last
    # Runs of one offset that follow one another are one rising span.
    opens = first % columns == 0
    opens[1:] |= ~(single[1:] & single[:-1])
    start = opens.nonzero().flatten()
    end = torch.cat([start[1:], torch.tensor([len(first)])]) - 1
    spans = torch.stack([first[start], last[end], number[first[start]], single[start].long()], 1)
    buckets = rows[changes]
    return Spans(
        buckets,
        number.to(torch.int32),
        spans.to(torch.int32).contiguous(),
        torch.repeat_interleave(last[end] - first[start] + 1).to(torch.int32),
        bool((buckets.diff() == 1).all()),
        _varying(spans) if len(bucket) == 1 else (0, bucket.numel()),
    )


def _varying(spans: Int[Tensor, "S 4"]) -> tuple[int, int]:
    (_, begin, _, step), (last, end, _, last_step) = spans[0].tolist(), spans[-1].tolist()
    low = 0 if step else begin + 1
    return low, max(low, end + 1 if last_step else last)
