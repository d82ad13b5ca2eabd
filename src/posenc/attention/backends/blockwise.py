"""The definition, a block of queries at a time: memory linear in the length, on any device.

Memory grows with a block of queries times its keys, not with queries times keys. A block looks at
the keys from the first to the last that any of its queries sees.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result, join_queries
from posenc.attention.backends.common.definition import attend_by_definition
from posenc.attention.problem.lowering import given_encoding, part_of
from posenc.attention.problem.offsets import run_intervals
from posenc.attention.problem.problem import CounterDropout, GlobalSoftmax, Problem, draw_seed
from posenc.encoding import (
    BlockTransforms,
    Encoding,
    GateCounts,
    LogGateSums,
    ScoreTerm,
    StickWeights,
)
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.grid import Grid
from posenc.runtime import has_values, is_transformed

BLOCK = BlockTransforms.BLOCK

CPU = torch.device("cpu")
"""Device that seeds are drawn on, since their values are read."""

BUDGET = 2**21
"""Logits a block, so that a tensor of them has 8 MiB in float32."""


class Blockwise(Backend):
    """The definition, a block of queries at a time, computed again for the backward pass.

    Gradients of everything, dropout included, which is the same for any blocks.
    """

    name = "blockwise"

    def plan(self, problem: Problem) -> Plan | Refusal:
        if torch.compiler.is_compiling():
            return Refusal("a compiled graph would hold all of its blocks")
        how = "the definition, a block of queries at a time" + _memory(problem)
        return Plan(how, partial(_attend_blockwise, problem), by_definition=True)


def _memory(problem: Problem) -> str:
    score = problem.encoding.score
    if score is not None and score.keys_by_keys and block_transforms(problem) is None:
        return " (its score takes memory K×K)"
    if is_transformed():
        return ", which torch.func can transform"
    return " (memory linear in the length)"


def _attend_blockwise(problem: Problem, *, lse: bool) -> Result:
    problem = with_counter_dropout(problem.rotated)
    (batch, heads, queries, _), keys = problem.q.shape, problem.k.shape[2]
    size = max(1, min(queries, BUDGET // max(1, batch * heads * keys)))
    form, cuts = block_transforms(problem), looks_at_seen_keys(problem)
    transformed: tuple[Tensor, ...] = ()
    if form is not None:
        transformed = form.compute()
        size = max(BLOCK, size - size % BLOCK)
    blocks, begin = [], 0
    while begin < queries:
        # With block transforms, the last query's own key is the last of a block.
        ahead = 0 if form is None else (form.first + begin) % BLOCK
        rows = slice(begin, min(queries, begin + size - ahead))
        grid = problem.grid.slice(rows.start, rows.stop)
        visible_keys = seen_keys(grid, rows, problem.grid) if cuts else slice(0, keys)
        block = _block_problem(problem, grid, rows, visible_keys)
        if form is not None:
            score = TransformedProducts(transformed, form.first, begin)
            block = replace(block, encoding=Encoding(score=score, value=problem.encoding.value))
        blocks.append(_attend_block(block, lse=lse))
        begin = rows.stop
    return join_queries(blocks)


def with_counter_dropout(problem: Problem) -> Problem:
    """The problem with dropout by the tokens' indices, which does not depend on the blocks.

    Under ``torch.func``, where no seed can be drawn, as it is.
    """
    if not problem.dropout or is_transformed():
        return problem
    device = problem.q.device
    query, key = (torch.arange(x.shape[2], device=device)[None] for x in (problem.q, problem.k))
    counter_dropout = CounterDropout(problem.dropout, int(draw_seed(CPU)), query, key)
    return replace(problem, dropout=0.0, counter_dropout=counter_dropout)


def looks_at_seen_keys(problem: Problem) -> bool:
    """True if keys that no query sees change nothing."""
    score, value = problem.encoding.score, problem.encoding.value
    if problem.lowered is not None and not is_transformed():
        return True
    if (score is None or score.pairwise) and (value is None or value.pairwise):
        return True
    if value is not None or score is None or score.keys_by_keys:
        return False
    return isinstance(problem.fused(), GateCounts | LogGateSums | StickWeights)


def block_transforms(problem: Problem) -> BlockTransforms | None:
    """The score's block transforms, where keys lie in the order that their products need."""
    score, grid = problem.encoding.score, problem.grid
    if score is None or not score.keys_by_keys:
        return None
    regular = grid.shift is not None and not grid.segmented
    if not regular and run_intervals(grid) is None:
        return None
    form = problem.fused()
    return form if isinstance(form, BlockTransforms) else None


def seen_keys(grid: Grid, rows: slice, all_rows: Grid) -> slice:
    """Keys from the first to the last that the queries of a block see; one where there is none.

    Args:
        grid: of the block; rows: its queries.
        all_rows: the grid of all queries.
    """
    count, shift, (lowest, highest) = grid.key.length, all_rows.shift, all_rows.band
    if shift is not None and not all_rows.segmented:
        first = min(max(0, rows.start + lowest - shift), count - 1)
        return slice(first, max(first + 1, min(count, rows.stop + highest - shift)))
    if grid.query.device.type != "cpu" or not has_values(grid.key.order):
        return slice(0, count)
    visible = grid.visible.flatten(0, 2).any(0).nonzero().flatten()
    return slice(int(visible[0]), int(visible[-1]) + 1) if len(visible) else slice(0, 1)


def _block_problem(problem: Problem, grid: Grid, rows: slice, keys: slice) -> Problem:
    """The problem of some queries and keys, with the grid of these queries.

    By its structured form, if there is one: what that is made of is computed once.
    """
    softmax, counter_dropout = problem.global_softmax, problem.counter_dropout
    if softmax is not None:
        softmax = GlobalSoftmax(softmax.output[:, :, rows], softmax.lse[:, :, rows])
    if keys != slice(0, grid.key.length):
        grid = replace(grid, key=grid.key.slice(keys.start, keys.stop))
    if counter_dropout is not None:
        query, key = counter_dropout.query[:, rows], counter_dropout.key[:, keys]
        counter_dropout = replace(counter_dropout, query=query, key=key)
    block = replace(
        problem,
        q=problem.q[:, :, rows],
        k=problem.k[:, :, keys],
        v=problem.v[:, :, keys],
        grid=grid,
        global_softmax=softmax,
        counter_dropout=counter_dropout,
        lowered=None,
    )
    if problem.lowered is None or is_transformed():
        return block
    return replace(block, encoding=given_encoding(part_of(problem.lowered, rows, keys)))


def _attend_block(block: Problem, *, lse: bool) -> Result:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
        return attend_by_definition(replace(block, q=q, k=k, v=v), lse=lse)

    # torch.func's transforms do not take the hooks by which a checkpoint computes again.
    if not torch.is_grad_enabled() or is_transformed():
        return run(block.q, block.k, block.v)
    result: Result = checkpoint(run, block.q, block.k, block.v, use_reentrant=False)
    return result


class TransformedProducts(ScoreTerm):
    """Score part: products of some queries with keys, through block transforms.

    Args:
        tensors: of all queries and keys, as ``BlockTransforms.compute`` gives them: queries
            ``[B, H, Q, E]``, keys ``[B, H, K, E]``, matrices ``[B, H, N, E, E]`` and products of
            queries with the keys of their own block ``[B, H, Q, T]``.
        first: index of the first query's key of offset 0.
        begin: number of these queries' first among all.
    """

    axes = None
    replaces_product = True

    def __init__(self, tensors: tuple[Tensor, ...], first: int, begin: int) -> None:
        super().__init__()
        self.tensors, self.first, self.begin = tensors, first, begin

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        all_queries, all_keys, matrices, all_diagonal = self.tensors
        size, count, at = BLOCK, q.shape[2], self.first + self.begin
        rows = slice(self.begin, self.begin + count)
        query, diagonal = all_queries[:, :, rows], all_diagonal[:, :, rows]
        logits = []
        for block in range((at + count - 1) // size, -1, -1):
            # Queries whose own key lies in an earlier block, in this one, and in a later one.
            before, here = (min(max(0, size * (block + n) - at), count) for n in (0, 1))
            keys = all_keys[:, :, size * block : size * (block + 1)]
            width = keys.shape[2]
            later = query[:, :, here:]
            blank = query.new_zeros(*query.shape[:2], before, width)
            logits.append(
                torch.cat([blank, diagonal[:, :, before:here, :width], later @ keys.mT], 2)
            )
            query = torch.cat([query[:, :, :here], later @ matrices[:, :, block]], 2)
        scores = torch.cat(logits[::-1], 3)
        missing = k.shape[2] - scores.shape[3]
        return torch.nn.functional.pad(scores, (0, missing))


ENTRY = Blockwise()
