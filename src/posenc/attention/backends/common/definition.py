"""Attention by the definition (``forward``) of each part."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attention.backends.common.base import Result
from posenc.attention.problem.problem import GlobalSoftmax, Problem
from posenc.attention.softmax import log_add_exp, softmax_with_sinks
from posenc.encoding import repeat_heads
from posenc.runtime import is_transformed, widest

BUDGET = 2**23
"""Logits at a time of which sums are taken, 32 MiB in float32."""


def attend_by_definition(problem: Problem, *, lse: bool = False) -> Result:
    """Materialises the logits, in float32 or better; memory H·Q·K a batch row."""
    logits, visible = _logits(problem), problem.grid.visible
    v = repeat_heads(problem.v, problem.heads).to(logits.dtype)
    score, value = problem.encoding.score, problem.encoding.value
    if problem.global_softmax is not None:
        weights = _weights_in(problem.global_softmax, logits, visible)
    elif score is not None and score.replaces_softmax:
        weights = logits.exp().masked_fill(~visible, 0.0)
    else:
        weights = softmax_with_sinks(logits, visible, problem.sinks)
    after_dropout = torch.dropout(weights, problem.dropout, train=problem.dropout > 0)
    if problem.counter_dropout is not None:
        after_dropout = weights * problem.counter_dropout.factors(weights)
    output = after_dropout @ v
    if value is not None:
        output = output + value(after_dropout, problem.grid)
    if problem.global_softmax is not None:
        output = output - problem.global_softmax.output.detach() * weights.sum(-1, keepdim=True)
    sums = _masked_lse(logits, visible, problem.sinks) if lse else None
    return Result(output.to(problem.v.dtype), sums)


def _weights_in(
    global_softmax: GlobalSoftmax,
    logits: Float[Tensor, "B H Q K"],
    visible: Bool[Tensor, "b 1 Q K"],
) -> Float[Tensor, "B H Q K"]:
    """Weights of these keys among all keys.

    A logit's gradient is its weight times ``dO·v - dO·O``, O the output over all keys.
    """
    lse = global_softmax.lse.detach()
    lse = lse.masked_fill(lse.isneginf(), torch.inf).unsqueeze(-1)
    rounded = lse.to(logits.dtype)
    rest = (lse - rounded).nan_to_num().to(logits.dtype)
    return (logits.masked_fill(~visible, -torch.inf) - rounded - rest).exp()


def lse_by_definition(problem: Problem) -> Float[Tensor, "B H Q"]:
    """LSE, some queries at a time: one more product of queries and keys.

    For kernels that keep it to themselves.
    """

    def compute(q: Tensor, k: Tensor, rows_problem: Problem) -> Tensor:
        return _masked_lse(
            _logits(replace(rows_problem, q=q, k=k)), rows_problem.grid.visible, problem.sinks
        )

    batch, heads, queries, _ = problem.q.shape
    size = max(1, BUDGET // max(1, batch * heads * problem.k.shape[2]))
    grid, parts = problem.grid, []
    for begin in range(0, max(1, queries), size):
        rows = grid.slice(begin, begin + size)
        operands = problem.q[:, :, begin : begin + size], problem.k, replace(problem, grid=rows)
        traced = is_transformed() or torch.compiler.is_compiling()
        if traced or not torch.is_grad_enabled():
            lse = compute(*operands)
        else:  # no logits are kept for the backward pass
            lse = checkpoint(compute, *operands, use_reentrant=False)
        parts.append(lse)
    return torch.cat(parts, dim=2)


def _masked_lse(
    logits: Float[Tensor, "B H Q K"], visible: Bool[Tensor, "b 1 Q K"], sinks: Tensor | None
) -> Float[Tensor, "B H Q"]:
    """-inf, or the sink's logit, with gradients of zero for keys, where a query sees none.

    Nor where all that it sees have logits of -inf.
    """
    shown = logits.masked_fill(~visible, -torch.inf)
    nothing = shown.detach().isneginf().all(-1)
    shown = shown.masked_fill(nothing.unsqueeze(-1), 0.0)  # gradients are zero, and not NaN
    largest = shown.detach().amax(-1, keepdim=True)
    # Both summands are exact to a rounding of their own, which is lost in a sum of their precision.
    wide = torch.promote_types(logits.dtype, widest(logits.device))
    lse = largest.to(wide).squeeze(-1) + (shown - largest).exp().sum(-1).log()
    lse = lse.masked_fill(nothing, -torch.inf)
    return lse if sinks is None else log_add_exp(lse, sinks.to(lse.dtype).unsqueeze(-1))


def _logits(problem: Problem) -> Float[Tensor, "B H Q K"]:
    """Logits of every pair, in float32 or better."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q, k = problem.q.to(wide), repeat_heads(problem.k, problem.heads).to(wide)
    score = problem.encoding.score
    if score is not None and score.replaces_product:
        logits: Tensor = score(q, k, problem.grid, scale=problem.scale)
    else:
        logits = q @ k.mT * problem.scale
        if score is not None:
            logits = logits + score(q, k, problem.grid, scale=problem.scale)
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    return logits.to(wide)  # float64 positions give float64 scores
