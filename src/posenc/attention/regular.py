"""Structured terms over a regular grid, read at every offset: the form that kernels take.

With W = Q + K - 1 offsets and ``c = j - i + Q - 1`` the index of a pair's offset among them:

``s_ij = scale · q_i·k_j + bias_by_offset[h, c] + left_i · left_rows[h, c]
+ right_j · right_rows[h, c] + column[h, j]`` and ``o_i = Σ_j p_ij (v_j + value_rows[h, c])``.

Summands that are the same for all keys of a query (``row``) change no weight and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding import BucketedTerms, LowRank, StructuredScore, TokenTableProduct
from posenc.grid import Grid
from posenc.runtime import has_values


@dataclass(frozen=True, eq=False)
class Regular:
    """All terms of a problem at every offset of a regular grid.

    Args:
        bias_by_offset: ``[H, W]``.
        left: ``[B, H, Q, F]`` and ``left_rows`` ``[H|1, W, F]``; both or neither.
        right: ``[B, H, K, F]`` and ``right_rows`` ``[H|1, W, F]``; both or neither.
        column: ``[B|1, H, K]``.
        value_rows: ``[H|1, W, E]``.
        factors: low-rank terms.
    """

    bias_by_offset: Float[Tensor, "H W"] | None
    left: Float[Tensor, "B H Q F"] | None
    left_rows: Float[Tensor, "h W F"] | None
    right: Float[Tensor, "B H K F"] | None
    right_rows: Float[Tensor, "h W F"] | None
    column: Float[Tensor, "b H K"] | None
    value_rows: Float[Tensor, "h W E"] | None
    factors: tuple[LowRank, ...]

    @property
    def table_only(self) -> bool:
        """True if there are no terms but an offset bias."""
        others = (self.left, self.right, self.column, self.value_rows)
        return not self.factors and all(other is None for other in others)


def read_offsets(
    lowered: Iterable[StructuredScore], grid: Grid, *, device: torch.device
) -> Regular:
    """Read the terms at every offset of a regular grid.

    Gradients flow back into tables and rows through the reading.

    Raises:
        ArgumentError: where the grid is not regular.
    """
    offsets = grid.float_offsets(device=device).unsqueeze(-1)
    terms = list(lowered)
    groups = [term for term in terms if isinstance(term, BucketedTerms)]
    places = [group.bucket(offsets) for group in groups]
    pairs = list(zip(groups, places, strict=True))
    left, left_rows = _stack([(g.left, n) for g, n in pairs if g.left is not None])
    right, right_rows = _stack([(g.right, n) for g, n in pairs if g.right is not None])
    return Regular(
        bias_by_offset=_sum([g.table[:, n] for g, n in pairs if g.table is not None]),
        left=left,
        left_rows=left_rows,
        right=right,
        right_rows=right_rows,
        column=_sum([g.column for g in groups if g.column is not None]),
        value_rows=_sum([g.value[:, n] for g, n in pairs if g.value is not None]),
        factors=tuple(term for term in terms if isinstance(term, LowRank)),
    )


def max_distance_of(lowered: Iterable[StructuredScore]) -> int | None:
    """Distance beyond which no term changes with the offset; None: not known."""
    distances = [term.max_distance for term in lowered if reads_offsets(term)]
    known = [max_distance for max_distance in distances if max_distance is not None]
    return max(known, default=0) if len(known) == len(distances) else None


def reads_offsets(term: StructuredScore) -> TypeGuard[BucketedTerms]:
    """True if a term depends on the offset; False if only on single tokens."""
    if isinstance(term, LowRank):
        return False
    parts = (term.table, term.left, term.right, term.value)
    return any(part is not None for part in parts)


def _sum(tensors: Sequence[Tensor]) -> Tensor | None:
    return sum(tensors[1:], tensors[0]) if tensors else None


def _read(rows: Float[Tensor, "h N F"], place: Int[Tensor, "W"]) -> Float[Tensor, "h W F"]:
    """``rows[:, place]``; on the CPU no copy where these are all the rows in their order."""
    plain = place.device.type == "cpu" and has_values(place)
    if plain and torch.equal(place, torch.arange(rows.shape[1], dtype=place.dtype)):
        return rows
    return rows[:, place]


def _stack(
    products: Sequence[tuple[TokenTableProduct | None, Tensor]],
) -> tuple[Tensor | None, Tensor | None]:
    """Several products as one, their features side by side."""
    present = [(product, place) for product, place in products if product is not None]
    if not present:
        return None, None
    rows = [_read(product.rows, place) for product, place in present]
    heads = max(row.shape[0] for row in rows)
    tokens = [product.tokens for product, _ in present]
    if len(present) == 1:
        return tokens[0], rows[0]
    spread = [row.expand(heads, -1, -1) for row in rows]
    return torch.cat(tokens, dim=-1), torch.cat(spread, dim=-1)
