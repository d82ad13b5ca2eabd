"""Attention in memory linear in the length for every method, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.blockwise.definition import CPU, attend_blockwise, block_transforms
from posenc.attention.backends.blockwise.offsets import BLOCKWISE
from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result
from posenc.attention.problem.lowering import add_rows, rows_of, sinks_without_rows, without_rows
from posenc.attention.problem.offsets import Offsets
from posenc.attention.problem.problem import Problem, draw_seed
from posenc.attention.problem.record import (
    Geometry,
    KernelProblem,
    PairTerm,
    RotaryFactors,
    SegmentMask,
)
from posenc.attention.problem.terms import AXES, of_tokens, read_terms
from posenc.encoding import StructuredScore, repeat_heads
from posenc.runtime import is_transformed

__all__ = ["Blockwise"]


class Blockwise(Backend):
    """A block of queries at a time, computed again for the backward pass, in plain PyTorch.

    Structured terms over regular grids are read by offset; all else goes by definition, and so does
    everything under ``torch.func`` and forward-mode differentiation. Gradients of everything,
    dropout included, which is the same for any blocks.
    """

    name = "blockwise"

    def plan(self, problem: Problem) -> Plan | Refusal:
        grid = problem.grid
        regular = grid.shift is not None and not grid.segmented and problem.lowered is not None
        if regular and problem.counter_dropout is None and not is_transformed():
            how = "blocks of queries, terms read by offset (memory linear in the length)"
            return Plan(how, partial(_attend_regular, problem))
        if torch.compiler.is_compiling():
            return Refusal(
                "inside a compiled graph it takes regular layouts and structured terms only, "
                "outside any transform of torch.func"
            )
        how = "the definition, a block of queries at a time" + _memory(problem)
        return Plan(how, partial(attend_blockwise, problem), by_definition=True)


def _memory(problem: Problem) -> str:
    score = problem.encoding.score
    if score is not None and score.keys_by_keys and block_transforms(problem) is None:
        return " (its score takes memory K×K)"
    if is_transformed():
        return ", which torch.func can transform"
    return " (memory linear in the length)"


def _attend_regular(problem: Problem, *, lse: bool) -> Result:
    problem = problem.rotated
    lowered, global_softmax = problem.lowered or (), problem.global_softmax
    # Without a cap, summands that are the same for all keys of a query change no weight.
    inside = problem.softcap is not None
    outside: tuple[StructuredScore, ...] = () if inside else lowered
    rows = rows_of(lowered) if inside else []
    record = _record(problem, rows, sinks_without_rows(problem.sinks, outside))
    if global_softmax is not None:
        sums = without_rows(global_softmax.lse, outside).detach()
        results = (x.to(record.q.dtype) for x in (global_softmax.output, sums))
        zeros, _ = BLOCKWISE.zeros(record, *results, global_lse=True)
        return Result(zeros.to(problem.v.dtype), None)
    output, row_lse = BLOCKWISE.attend(record)
    return Result(output.to(problem.v.dtype), add_rows(row_lse, outside) if lse else None)


def _record(
    problem: Problem, rows: Sequence[Tensor], sinks: Float[Tensor, "b H q"] | None
) -> KernelProblem:
    """The record, with all tensors in one dtype and keys repeated to the query heads.

    Args:
        rows: summands of each query's logits, ``[B|1, H|1, Q]``.
        sinks: beside the logits with these rows.
    """
    q, k, scale = problem.q, problem.k, problem.scale
    offsets, (batch, heads) = Offsets.regular(problem.grid), q.shape[:2]
    terms = read_terms(problem.lowered or (), q, offsets.reach, bucketed=False)
    wide = torch.promote_types(q.dtype, torch.float32)
    if terms.column is not None:  # float64 where they are sums that grow with the length
        wide = torch.promote_types(wide, terms.column.dtype)

    def cast(name: str, x: Tensor) -> Tensor:
        """Shared by no batch rows and heads, but for rows of buckets."""
        x, sizes = x.to(wide), (batch, heads) if of_tokens(name) else (heads,)
        if "N" in AXES[name]:
            return x.contiguous()
        return x.expand(*sizes, *(-1 for _ in x.shape[len(sizes) :]))

    q, k, v = q.to(wide), *(repeat_heads(x.to(wide), heads) for x in (k, problem.v))
    factors = [(row.unsqueeze(-1), torch.ones_like(k[:1, :, :, :1])) for row in rows]
    if terms.query_factor is not None and terms.key_factor is not None:
        factors.append((terms.query_factor, terms.key_factor))
    if factors:  # as extra columns
        q, k = (
            torch.cat([x, *(y.to(wide).expand(batch, heads, -1, -1) for y in more)], dim=-1)
            for x, more in zip((q * scale, k), zip(*factors, strict=True), strict=True)
        )
        scale = 1.0
    return KernelProblem(
        *(q, k, v, scale),
        terms=replace(terms.map(cast), query_factor=None, key_factor=None),
        pairs=PairTerm(),
        geometry=Geometry(offsets.shift, *offsets.band),
        segments=SegmentMask(),
        rotary=RotaryFactors(),
        dropout=problem.dropout,
        seed=draw_seed(CPU) if problem.dropout else None,
        sinks=None if sinks is None else sinks.to(wide),
        softcap=problem.softcap or 0.0,
    )


ENTRY = Blockwise()
