"""Every method in memory that grows with the length, forward and backward, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from posenc.attention.backends.blockwise.definition import (
    attend_blockwise,
    block_transforms,
    draw_seed,
)
from posenc.attention.backends.blockwise.offsets import Operands, blockwise
from posenc.attention.backends.common.base import Backend, Plan, Problem, Result, Unsupported
from posenc.attention.lowering import add_rows, repeat_heads, without_rows
from posenc.attention.regular import Regular, read_offsets
from posenc.encoding import BucketedTerms
from posenc.runtime import is_transformed

__all__ = ["Blockwise"]


class Blockwise(Backend):
    """A block of queries at a time, computed again for the backward pass, in plain PyTorch.

    Structured terms over regular grids are read by offset; all else goes by definition, and so does
    everything under ``torch.func`` and forward-mode differentiation. Gradients of everything,
    dropout included, which is the same for any blocks.
    """

    name = "blockwise"
    differentiates_parts = True
    keyed_dropout = True
    sinks_and_caps = True

    def plan(self, problem: Problem) -> Plan | Unsupported:
        grid = problem.grid
        regular = grid.shift is not None and not grid.segmented and problem.lowered is not None
        if regular and problem.keyed is None and not is_transformed():
            how = "blocks of queries, terms read by offset (memory linear in the length)"
            return Plan(how, partial(_attend_regular, problem))
        if torch.compiler.is_compiling():
            return Unsupported(
                "inside a compiled graph it takes regular layouts and structured terms only, "
                "outside any transform of torch.func"
            )
        how = "the definition, a block of queries at a time" + _memory(problem)
        return Plan(how, partial(attend_blockwise, problem), differentiable_twice=True)


def _memory(problem: Problem) -> str:
    score = problem.encoding.score
    if score is not None and score.keys_by_keys and block_transforms(problem) is None:
        return " (its score takes memory K×K)"
    if is_transformed():
        return ", which torch.func can transform"
    return " (memory linear in the length)"


def _attend_regular(problem: Problem, *, lse: bool) -> Result:
    assert problem.lowered is not None
    terms = read_offsets(problem.lowered, problem.grid, device=problem.q.device)
    # Without a cap or sinks, summands that are the same for all keys of a query change no weight.
    groups = [term for term in problem.lowered if isinstance(term, BucketedTerms)]
    rows = [group.row for group in groups if group.row is not None]
    inside = problem.sinks is not None or problem.softcap is not None
    x, scale = _operands(problem, terms, rows if inside else [])
    apart = () if inside else problem.lowered
    whole, wide, grid = problem.whole, x.q.dtype, problem.grid
    if whole is not None:
        sums = without_rows(whole.lse, apart)
        x = replace(x, output=whole.output.to(wide), lse=sums.to(wide))
    tensors, names = x.flat()
    graded = torch.is_grad_enabled()
    output, row_lse = blockwise(
        tensors,
        names,
        [graded and tensor.requires_grad for tensor in tensors],
        [grid.require_shift(), int(grid.causal), -1 if grid.window is None else grid.window],
        scale,
        problem.softcap or 0.0,
        problem.dropout,
        draw_seed(problem),
    )
    return Result(output.to(problem.v.dtype), add_rows(row_lse, apart) if lse else None)


def _operands(problem: Problem, terms: Regular, rows: Sequence[Tensor]) -> tuple[Operands, float]:
    """The operands, and the factor of their products.

    Args:
        rows: summands of each query's logits, ``[B|1, H|1, Q]``.
    """
    q, k, scale = problem.q, problem.k, problem.scale
    batch, heads = q.shape[:2]
    wide = torch.promote_types(q.dtype, torch.float32)
    if terms.column is not None:  # float64 where they are sums that grow with the length
        wide = torch.promote_types(wide, terms.column.dtype)

    def spread(x: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
        """Shared by no batch rows and heads; later sizes stay."""
        return (
            None if x is None else x.to(wide).expand(*sizes, *(-1 for _ in x.shape[len(sizes) :]))
        )

    def rows_of(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(wide).contiguous()

    q, k, v = q.to(wide), *(repeat_heads(x.to(wide), heads) for x in (k, problem.v))
    factors = [(f.query, f.key) for f in terms.factors]
    factors += [(row.unsqueeze(-1), torch.ones_like(k[:1, :, :, :1])) for row in rows]
    if factors:  # as extra columns
        size = (batch, heads, -1, -1)
        q, k = (
            torch.cat([x, *(y.to(wide).expand(size) for y in more)], dim=-1)
            for x, more in zip((q * scale, k), zip(*factors, strict=True), strict=True)
        )
        scale = 1.0
    return Operands(
        q,
        k,
        v,
        bias_by_offset=spread(terms.bias_by_offset, (heads,)),
        left=spread(terms.left, (batch, heads)),
        left_rows=rows_of(terms.left_rows),
        right=spread(terms.right, (batch, heads)),
        right_rows=rows_of(terms.right_rows),
        column=spread(terms.column, (batch, heads)),
        value_rows=rows_of(terms.value_rows),
        sinks=spread(problem.sinks, ()),
    ), scale


ENTRY = Blockwise()
