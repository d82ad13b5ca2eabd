"""From an encoding's parts to the structured form that fast backends compute with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import BucketedTerms, Encoding, LowRank, StructuredScore
from posenc.grid import Grid

__all__ = [
    "add_rows",
    "bias_by_offset",
    "is_constant_table",
    "lower",
    "reads_tokens",
    "repeat_heads",
]


def repeat_heads(x: Float[Tensor, "B G K D"], heads: int) -> Float[Tensor, "B H K D"]:
    """Grouped key/value heads repeated to one a query head; free of cost where they agree."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def lower(
    encoding: Encoding,
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    grid: Grid,
    *,
    scale: float,
) -> tuple[StructuredScore, ...] | None:
    """Score and value parts in structured form: () if there are none, None if one has no such form.

    A part that replaces the product has none either: what it returns is no summand.
    """
    lowered: tuple[StructuredScore, ...] = ()
    if encoding.score is not None:
        if encoding.score.replaces_product:
            return None
        terms = encoding.score.lower(q, repeat_heads(k, q.shape[1]), grid, scale=scale)
        if terms is None:
            return None
        lowered += terms
    if encoding.value is not None:
        term = encoding.value.lower(grid)
        if term is None:
            return None
        lowered += (term,)
    return lowered


def bias_by_offset(group: BucketedTerms, grid: Grid) -> Float[Tensor, "H offsets"]:
    """A group's table read at every offset of a regular grid, ascending: ``[H, Q + K - 1]``."""
    assert group.table is not None  # callers choose groups that have one
    offsets = grid.line_offsets(device=group.table.device)
    return group.table[:, group.bucket(offsets.unsqueeze(-1))]


def add_rows(
    lse: Float[Tensor, "B H Q"], lowered: Iterable[StructuredScore]
) -> Float[Tensor, "B H Q"]:
    """LSE of the whole logits, from one of logits without the ``row`` terms.

    A ``row`` term is the same for all keys of a query: no output depends on it.
    """
    for term in lowered:
        if isinstance(term, BucketedTerms) and term.row is not None:
            lse = lse + term.row.detach()
    return lse


def reads_tokens(term: StructuredScore) -> bool:
    """True if a term may depend on queries or keys: all but tables and values may."""
    if isinstance(term, LowRank):
        return True
    return any(part is not None for part in (term.left, term.right, term.row, term.column))


def is_constant_table(term: StructuredScore) -> bool:
    """True if a term is nothing but a table, whose entries need no gradient."""
    if isinstance(term, LowRank) or term.table is None:
        return False
    if term.table.requires_grad and torch.is_grad_enabled():
        return False
    others = (term.left, term.right, term.row, term.column, term.value)
    return all(other is None for other in others)
