"""A method's own definition, a block of queries at a time, computed again for the backward pass.

Serves what has no structured form (CoPE, FIRE, additive scores …) and layouts that are not regular:
memory grows with the block times the keys, no longer with queries times keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attention.backends.common.base import Problem, Result, Whole, join_queries
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.grid import Grid
from posenc.runtime import is_transformed

BUDGET = 2**23
"""Logits a block, so that a tensor of them has 32 MiB in float32."""


def attend_blockwise(problem: Problem, *, lse: bool) -> Result:
    """Attention by definition, block by block."""
    batch, heads, queries, _ = problem.q.shape
    size = max(1, min(queries, BUDGET // max(1, batch * heads * problem.k.shape[2])))
    blocks = [
        _block(problem, begin, min(begin + size, queries), lse=lse)
        for begin in range(0, queries, size)
    ]
    return join_queries(blocks)


def _block(problem: Problem, begin: int, end: int, *, lse: bool) -> Result:
    whole = problem.grid
    grid = Grid(whole.query.slice(begin, end), whole.key, whole.causal, whole.window)
    given = problem.whole
    given = None if given is None else Whole(*(x[:, :, begin:end] for x in given))
    keyed = None if problem.keyed is None else problem.keyed.rows(begin, end)
    part = replace(problem, grid=grid, whole=given, keyed=keyed)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
        return attend_by_definition(replace(part, q=q, k=k, v=v), lse=lse)

    q = problem.q[:, :, begin:end]
    whole_range = begin == 0 and end == problem.q.shape[2]
    # torch.func's transforms do not take the hooks by which a checkpoint computes again.
    if whole_range or not torch.is_grad_enabled() or is_transformed():
        return run(q, problem.k, problem.v)
    result: Result = checkpoint(run, q, problem.k, problem.v, use_reentrant=False)
    return result
