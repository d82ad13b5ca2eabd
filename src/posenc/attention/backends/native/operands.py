"""The structured form of a problem, as the kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.backends.common.base import Problem
from posenc.attention.images import axis_rows, image_table
from posenc.attention.lowering import lower, repeat_heads
from posenc.attention.regular import reads_offsets
from posenc.encoding import BucketedTerms, FusedScore, LowRank, StructuredScore, TokenTableProduct
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.integers import exact_dtype
from posenc.runtime import has_values


@dataclass(frozen=True, eq=False)
class Operands:
    """All terms of a problem.

    Args:
        first: the offset of the first entry of ``line`` and ``bucket``.
        q_factor, k_factor, line, column, left, left_rows, right, right_rows, value_rows, bucket:
            see ``op.native``.
        period, jump: of images, see ``op.native``.
    """

    first: int
    q_factor: Float[Tensor, "b H Q R"] | None = None
    k_factor: Float[Tensor, "b H K R"] | None = None
    line: Float[Tensor, "h W"] | None = None
    column: Float[Tensor, "b H K"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h N F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h N F"] | None = None
    value_rows: Float[Tensor, "h N E"] | None = None
    bucket: Int[Tensor, "W"] | None = None
    period: int = 0
    jump: int = 0


def terms_of(problem: Problem, domain: tuple[int, int]) -> tuple[StructuredScore, ...] | None:
    """The structured form; of documents, where each has one, that of a sequence with all offsets.

    None where there is none.
    """
    score = problem.encoding.score
    if problem.lowered is not None or (score is not None and score.replaces_product):
        return problem.lowered
    grid, (first, last), queries = problem.grid, domain, problem.q.shape[2]
    if grid.query.signal is not None or grid.key.signal is not None:
        return None
    if score is not None and score.reads_layout:
        return None
    device, start = problem.q.device, max(0, -first - queries + 1)
    query = Layout.sequence(queries, start, device=device)
    shift = max(0, first + queries - 1 + start)
    key = Layout.sequence(max(1, last - (shift - start) + 1), shift, device=device)
    wide = torch.promote_types(grid.query.positions.dtype, grid.key.positions.dtype)
    try:
        sequence = Grid(_wide(query, wide), _wide(key, wide), grid.causal, grid.window)
        width = problem.v.shape[3]
        q, k, scale = problem.q, problem.k, problem.scale
        return lower(problem.encoding, q, k, sequence, scale=scale, value_dim=width)
    except ArgumentError:  # an offset that no document has may be out of a table's range
        return None


def fused_form(problem: Problem) -> tuple[FusedScore | None, tuple[StructuredScore, ...] | None]:
    """The score's fused form, and the value part in structured form; None for what has none."""
    score, value, grid = problem.encoding.score, problem.encoding.value, problem.grid
    if score is None or grid.query.positions.requires_grad or grid.key.positions.requires_grad:
        return None, None
    term = None if value is None else value.lower(grid)
    k = repeat_heads(problem.k, problem.heads)
    form = score.fuse(problem.q, k, grid, scale=problem.scale)
    return form, () if value is None else None if term is None else (term,)


def _wide(layout: Layout, dtype: torch.dtype) -> Layout:
    return replace(layout, positions=layout.positions.to(dtype))


def operands(
    terms: Sequence[StructuredScore],
    problem: Problem,
    domain: tuple[int, int],
    reach: tuple[int, int],
) -> Operands:
    """The terms at the offsets of ``domain``; buckets go on beyond it, as far as ``reach``."""
    first, last = domain
    factors = [term for term in terms if isinstance(term, LowRank)]
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q_factor = _joined([x.query for x in factors], problem.heads, wide)
    k_factor = _joined([x.key for x in factors], problem.heads, wide)
    groups = [term for term in terms if isinstance(term, BucketedTerms)]
    if not groups:
        return Operands(first=first, q_factor=q_factor, k_factor=k_factor)
    device = problem.q.device
    dtype = exact_dtype(first, last, device)
    offsets = torch.arange(first, last + 1, device=device).to(dtype).unsqueeze(-1)
    buckets = [(g, g.bucket(offsets)) for g in groups if reads_offsets(g)]
    tables = [g.table.index_select(1, n) for g, n in buckets if g.table is not None]
    columns = [g.column for g in groups if g.column is not None]
    heads, size = problem.heads, (problem.q.shape[0], problem.heads, -1, -1)
    parts = [(g, n) for g, n in buckets if any(x is not None for x in (g.left, g.right, g.value))]
    rowed, maps = [g for g, _ in parts], [n for _, n in parts]
    counts = {len(rows[0]) for g in rowed for rows in _rows_of(g)}
    bucket, shared = None, len(rowed) == 1 or (len(counts) == 1 and _same(maps))
    if rowed:
        bucket = maps[0] if shared else torch.arange(last - first + 1, device=device)
    read = [None if shared else n for n in maps]
    pairs = list(zip(rowed, read, strict=True))
    own = (None, None) if factors else (problem.q, problem.k)  # factors are joined to their rows
    left, left_rows = _stacked([(g.left, at) for g, at in pairs], size, problem.q.dtype, own[0])
    right, right_rows = _stacked([(g.right, at) for g, at in pairs], size, problem.q.dtype, own[1])
    values = [_read(g.value, at) for g, at in pairs if g.value is not None]
    if bucket is not None and right_rows is not None:
        # Hidden pairs are read too.
        ends = (domain[0] - reach[0], reach[1] - domain[1])
        before, after = bucket[:1].expand(ends[0]), bucket[-1:].expand(ends[1])
        bucket, bucket_first = torch.cat([before, bucket, after]), reach[0]
        tables = [torch.nn.functional.pad(table, ends) for table in tables]
    else:
        bucket_first = first
    return Operands(
        first=bucket_first,
        q_factor=q_factor,
        k_factor=k_factor,
        line=_sum(tables),
        column=_sum([column.expand(-1, heads, -1) for column in columns]),
        left=left,
        left_rows=left_rows,
        right=right,
        right_rows=right_rows,
        value_rows=_sum(values),
        bucket=bucket,
    )


def image_operands(terms: Sequence[StructuredScore], problem: Problem) -> Operands:
    """Terms by the offsets between the cells of two images, one image row after the other."""
    grid, q = problem.grid, problem.q
    (_, columns), (_, key_columns) = grid.query.extent, grid.key.extent  # type: ignore[misc]
    groups = [term for term in terms if isinstance(term, BucketedTerms)]
    tables = [group for group in groups if group.table is not None]
    products = [TokenTableProduct(g.left.tokens, axis_rows(g, grid)) for g in groups if g.left]
    if len({id(product.tokens) for product in products}) == 1:
        products = [replace(products[0], rows=reduce(torch.add, [x.rows for x in products]))]
    size = (len(q), problem.heads, -1, -1)
    left, left_rows = _stacked([(product, None) for product in products], size, q.dtype, q)
    return Operands(
        first=0,
        left=left,
        left_rows=left_rows,
        line=image_table(tables, grid, device=problem.q.device).flatten(1) if tables else None,
        period=key_columns,
        jump=columns - 1,
    )


def _rows_of(group: BucketedTerms) -> list[Tensor]:
    """Rows of a group by bucket, each ``[H|1, N, F]``."""
    products = [product.rows for product in (group.left, group.right) if product is not None]
    return products if group.value is None else [*products, group.value]


def _read(rows: Tensor, at: Tensor | None) -> Tensor:
    return rows if at is None else rows.index_select(1, at)


def _stacked(
    products: Sequence[tuple[TokenTableProduct | None, Tensor | None]],
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    own: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Several products as one, their features side by side; tokens in the dtype of the kernel.

    Narrow tokens stay narrow: the kernel widens them. No tokens where they are ``own``.
    """
    found = [x.tokens for x, _ in products if x is not None]
    rows = [_read(x.rows, at) for x, at in products if x is not None]
    if not found:
        return None, None
    if len(found) == 1 and found[0] is own:
        return None, rows[0]
    wide = torch.promote_types(dtype, torch.float32)
    tokens = [(x if x.dtype == dtype else x.to(wide)).expand(size) for x in found]
    if len(tokens) == 1:
        return tokens[0], rows[0]
    heads = max(map(len, rows))
    return torch.cat(tokens, dim=-1), torch.cat([x.expand(heads, -1, -1) for x in rows], dim=-1)


def _joined(factors: Sequence[Tensor], heads: int, dtype: torch.dtype) -> Tensor | None:
    """Factors side by side, ``[B|1, H, L, R]``."""
    if not factors:
        return None
    rows = max(map(len, factors))
    found = [x.to(dtype).expand(rows, heads, -1, -1) for x in factors]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _sum(tensors: Sequence[Tensor]) -> Tensor | None:
    return sum(tensors[1:], tensors[0]) if tensors else None


def _same(maps: Sequence[Tensor]) -> bool:
    if not all(map(has_values, maps)):
        return False
    return all(torch.equal(maps[0], other) for other in maps[1:])
