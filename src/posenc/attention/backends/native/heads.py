"""Long sequences a few heads at a time, where the operands of all heads would fill the memory.

Operands of some heads are computed just before they are used, and again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attention.backends.native.op import NATIVE
from posenc.attention.backends.native.posing import seed_of
from posenc.attention.problem.lowering import sinks_without_rows
from posenc.attention.problem.problem import Problem
from posenc.attention.problem.record import KernelProblem
from posenc.encoding import BlockTransforms, LowRank, StructuredScore, repeat_heads

MANY = 2**15
"""Fewest keys of all batch rows and heads for which block transforms are computed by heads."""

SPLITS = 2
"""Blocks of a head's queries whose gradients are summed by separate threads."""

LARGE = 2**23
"""Fewest numbers in the rows or factors of all heads for which they are computed by heads."""

RecordOf = Callable[[Problem, slice], KernelProblem]
"""A function from a problem of some heads, and their slice, to its record without dropout, sinks
and softcap."""


def chunks_blocks(form: BlockTransforms) -> bool:
    """True if the operands of all heads are too large to be held at once."""
    batch, heads, keys, _ = form.key.shape
    return batch * heads * keys >= MANY and not torch.compiler.is_compiling()


def chunks_rows(problem: Problem) -> bool:
    """True if a score part's rows and factors of all heads are too large to be held at once."""
    score, terms = problem.encoding.score, problem.lowered
    if score is None or not score.lowers_heads or problem.global_softmax is not None:
        return False
    if torch.compiler.is_compiling():
        return False
    return sum(map(_size, terms or ())) >= LARGE and problem.encoding.value is None


def _size(term: StructuredScore) -> int:
    """Numbers in a term's factor of the queries, or in the rows that they are multiplied by."""
    if isinstance(term, LowRank):
        return term.query.numel()
    return 0 if term.left is None else term.left.rows.numel()


def attend_heads(problem: Problem, record: RecordOf) -> tuple[Tensor, Tensor]:
    """Output and LSE, as many heads at a time as there are threads for."""
    (batch, heads), seed = problem.q.shape[:2], seed_of(problem)
    size = -(-torch.get_num_threads() // (batch * SPLITS))
    sides = (repeat_heads(x, heads) for x in (problem.q, problem.k, problem.v))
    sinks = sinks_without_rows(problem.sinks, problem.lowered or ())
    of_sinks: Sequence[Tensor | None] = [None] * -(-heads // size)
    if sinks is not None:
        of_sinks = torch.split(sinks, size, 1)
    by_heads = []
    # Not slices: the gradient of a slice is as large as the whole.
    for at, inputs in enumerate(
        zip(*(torch.split(x, size, 1) for x in sides), of_sinks, strict=True)
    ):
        some = slice(at * size, min(heads, (at + 1) * size))

        def make_record(
            q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, some: slice = some
        ) -> KernelProblem:
            chunk = replace(problem, q=q, k=k, v=v, dropout=0.0, sinks=None)
            return replace(
                record(chunk, some),
                dropout=problem.dropout,
                seed=None if seed is None else seed + some.start,
                sinks=sinks,
                softcap=problem.softcap or 0.0,
                splits=SPLITS,
            )

        by_heads.append(_attend(make_record, *inputs))
    output, lse = (torch.cat(parts, dim=1) for parts in zip(*by_heads, strict=True))
    return output, lse


def _attend(
    make_record: Callable[..., KernelProblem], *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the record of some tensors, which is recomputed in the backward pass."""
    if not torch.is_grad_enabled():
        return NATIVE.attend(make_record(*inputs))
    results: list[Tensor] = []

    def run(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        record = make_record(*inputs)
        if not results:  # in the backward pass, only what gradients are computed from is
            with torch.no_grad():
                results.extend(NATIVE.attend(record))
        output, lse = results
        zeros = NATIVE.zeros(record, output, lse, global_lse=False)
        return output + zeros[0], lse + zeros[1]

    # Seeds of dropout are drawn before.
    result: tuple[Tensor, Tensor] = checkpoint(
        run, *inputs, use_reentrant=False, preserve_rng_state=False
    )
    return result
