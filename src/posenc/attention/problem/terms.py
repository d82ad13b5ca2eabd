"""The structured terms of a problem, read by offset, for compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeGuard, get_args, get_type_hints

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding import BucketedTerms, LowRank, StructuredScore, TokenTableProduct
from posenc.encoding.prepared import reused
from posenc.layout.integers import exact_dtype
from posenc.runtime import has_values


@dataclass(frozen=True, eq=False)
class Terms:
    """Summands of logits and values. With entry ``c = Δ - first`` and bucket ``n = bucket[c]``:

    ``s_ij += query_factor_i·key_factor_j + bias_by_offset[h, c] + left_i·left_rows[h, n]
    + right_j·right_rows[h, n] + column[h, j]`` and ``o_i += Σ_j p_ij value_rows[h, n]``.

    Summands that are the same for all keys of a query (``row``) change no weight and are left out.

    Args:
        query_factor: ``[B|1, H, Q, R]``, with key_factor ``[B|1, H, K, R]``.
        bias_by_offset: ``[H|1, W]``; column: ``[B|1, H, K]``.
        left: ``[B, H, Q, F]``, with left_rows ``[H|1, N, F]``; right: ``[B, H, K, F]``, with
            right_rows alike. None with rows: the queries, and the keys, of as many heads.
        value_rows: ``[H|1, N, E]``.
        bucket: ``[W]`` int64. None: each offset has rows of its own; between images, left_rows are
            those of each offset along the columns, then along the rows.
        first: offset of the first entry.
    """

    query_factor: Float[Tensor, "b H Q R"] | None = None
    key_factor: Float[Tensor, "b H K R"] | None = None
    bias_by_offset: Float[Tensor, "h W"] | None = None
    column: Float[Tensor, "b H K"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h N F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h N F"] | None = None
    value_rows: Float[Tensor, "h N E"] | None = None
    bucket: Int[Tensor, " W"] | None = None
    first: int = 0

    @property
    def bias_only(self) -> bool:
        """True if there are no terms but a bias by offset."""
        return list(self.operands()) == ["bias_by_offset"]

    @property
    def by_offset(self) -> list[Tensor]:
        """Operands with an entry or row for each offset or bucket."""
        rows = (getattr(self, name) for name in AXES if name not in OF_TOKENS)
        return [x for x in rows if x is not None]

    def operands(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        tensors: dict[str, Tensor] = {}
        for name in AXES:
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Terms:
        """Each operand changed, by its name; buckets and offsets as they are."""
        changed: dict[str, Any] = {name: change(name, x) for name, x in self.operands().items()}
        return replace(self, **changed)


AXES: dict[str, tuple[str, ...]] = {
    name: tuple(get_args(hint)[0].dim_str.split())
    for name, hint in get_type_hints(Terms).items()
    if name not in ("bucket", "first")
}
"""The axes of each operand, by name, in the order of the fields of ``Terms``."""


OF_TOKENS = frozenset(name for name, axes in AXES.items() if not {"Q", "K"}.isdisjoint(axes))
"""Names of the operands of queries or keys; the others are of offsets or buckets."""


def read_terms(
    lowered: Sequence[StructuredScore],
    q: Float[Tensor, "B H Q D"],
    offsets: tuple[int, int],
    *,
    bucketed: bool,
) -> Terms:
    """The terms at consecutive offsets; gradients flow back through the reading.

    Args:
        lowered: the structured terms; several products become one, their features side by side.
        q: the queries, whose batch, heads, dtype and device the terms are for. Tokens of another
            dtype become float32 or better.
        offsets: the first and last.
        bucketed: keep rows by bucket where all terms with rows share their buckets; else rows are
            read at each offset. Without it they always are, and ``bucket`` is None.
    """
    factors: list[LowRank] = []
    tables: list[Tensor] = []
    columns: list[Tensor] = []
    rowed: list[tuple[BucketedTerms, Tensor]] = []
    (first, last), at = offsets, None
    for term in lowered:
        if isinstance(term, LowRank):
            factors.append(term)
            continue
        if term.column is not None:
            columns.append(term.column.expand(-1, q.shape[1], -1))
        if not reads_offsets(term):
            continue
        if at is None:
            dtype = exact_dtype(first, last, q.device)
            at = torch.arange(first, last + 1, device=q.device).to(dtype).unsqueeze(-1)
        bucket = term.bucket(at)
        if term.table is not None:
            tables.append(term.table.index_select(1, bucket))
        if term.left is not None or term.right is not None or term.value is not None:
            rowed.append((term, bucket))
    terms = Terms(
        query_factor=_joined([x.query for x in factors], q) if factors else None,
        key_factor=_joined([x.key for x in factors], q) if factors else None,
        bias_by_offset=reduce(add, tables) if tables else None,
        column=reduce(add, columns) if columns else None,
        first=first,
    )
    return _with_rows(terms, rowed, q, last - first + 1, bucketed=bucketed) if rowed else terms


def _with_rows(
    terms: Terms,
    rowed: Sequence[tuple[BucketedTerms, Tensor]],
    q: Tensor,
    width: int,
    *,
    bucketed: bool,
) -> Terms:
    """The terms and rows of groups, by bucket or at each of ``width`` offsets, see ``read_terms``.

    Args:
        rowed: groups that have rows, and the bucket of each offset.
    """
    bucket = _shared_bucket(rowed) if bucketed else None
    read = rowed if bucket is None else [(group, None) for group, _ in rowed]
    if bucketed and bucket is None:
        bucket = torch.arange(width, device=q.device)
    left, left_rows = stacked([(g.left, n) for g, n in read], q)
    right, right_rows = stacked([(g.right, n) for g, n in read], q)
    values = [_rows(g.value, n) for g, n in read if g.value is not None]
    return replace(
        terms,
        left=left,
        left_rows=left_rows,
        right=right,
        right_rows=right_rows,
        value_rows=reduce(add, values) if values else None,
        bucket=bucket,
    )


def max_distance_of(lowered: Sequence[StructuredScore]) -> int | None:
    """Distance beyond which no term changes with the offset; None: not known."""
    distances = [term.max_distance for term in lowered if reads_offsets(term)]
    limits = [max_distance for max_distance in distances if max_distance is not None]
    return max(limits, default=0) if len(limits) == len(distances) else None


def reads_offsets(term: StructuredScore) -> TypeGuard[BucketedTerms]:
    """True if a term depends on the offset; False if only on single tokens."""
    if isinstance(term, LowRank):
        return False
    products = term.left is not None or term.right is not None
    return products or term.table is not None or term.value is not None


def _shared_bucket(rowed: Sequence[tuple[BucketedTerms, Tensor]]) -> Tensor | None:
    """The bucket of each offset, where it is the same for all groups with rows."""
    maps = [n for _, n in rowed]
    if len(maps) < 2:
        return maps[0] if maps else None
    counts = {rows.shape[1] for group, _ in rowed for rows in _rows_of(group)}
    same = len(counts) == 1 and all(map(has_values, maps))
    return maps[0] if same and all(torch.equal(maps[0], other) for other in maps[1:]) else None


def _rows_of(group: BucketedTerms) -> list[Tensor]:
    """Rows of a group by bucket, each ``[H|1, N, F]``."""
    products = [product.rows for product in (group.left, group.right) if product is not None]
    return products if group.value is None else [*products, group.value]


def _rows(rows: Float[Tensor, "h N F"], bucket: Tensor | None) -> Float[Tensor, "h W F"]:
    """``rows[:, bucket]``; on the CPU no copy where these are all the rows in their order."""
    if bucket is None:
        return rows
    plain = bucket.device.type == "cpu" and has_values(bucket)
    if plain and torch.equal(bucket, torch.arange(rows.shape[1], dtype=bucket.dtype)):
        return rows
    return rows.index_select(1, bucket)


def stacked(
    products: Sequence[tuple[TokenTableProduct | None, Int[Tensor, " W"] | None]],
    q: Float[Tensor, "B H Q D"],
) -> tuple[Float[Tensor, "B H L F"] | None, Float[Tensor, "h N F"] | None]:
    """Tokens and rows of several products as one, their features side by side.

    Args:
        products: with the bucket of each offset, where rows are to be read at each.
        q: as of ``read_terms``. Tokens as narrow as these stay narrow: kernels widen them.
    """
    present = [(product, bucket) for product, bucket in products if product is not None]
    if not present:
        return None, None
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = [_rows(product.rows, bucket) for product, bucket in present]
    tokens = [x.tokens if x.tokens.dtype == q.dtype else x.tokens.to(wide) for x, _ in present]
    tokens = [x if x.shape[:2] == q.shape[:2] else x.expand(*q.shape[:2], -1, -1) for x in tokens]
    if len(tokens) == 1:
        return tokens[0], rows[0]
    heads = max(map(len, rows))
    return torch.cat(tokens, dim=-1), torch.cat([x.expand(heads, -1, -1) for x in rows], dim=-1)


def _joined(factors: Sequence[Tensor], q: Tensor) -> Float[Tensor, "b H L R"]:
    """Factors side by side, in float32 or better."""
    rows, wide = max(map(len, factors)), torch.promote_types(q.dtype, torch.float32)
    expanded = [x.to(wide).expand(rows, q.shape[1], -1, -1) for x in factors]
    return expanded[0] if len(expanded) == 1 else torch.cat(expanded, dim=-1)


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
