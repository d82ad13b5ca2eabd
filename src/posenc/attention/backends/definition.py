"""Attention straight from each part's own definition."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.base import Problem
from posenc.attention.lowering import repeat_heads
from posenc.attention.scoring import masked_softmax

__all__ = ["attend_by_definition"]


def attend_by_definition(problem: Problem) -> Float[Tensor, "B H Q E"]:
    """Materialises the logits, in float32 or better; memory H·Q·K a batch row."""
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    q = problem.q.to(wide)
    k = repeat_heads(problem.k, problem.heads).to(wide)
    v = repeat_heads(problem.v, problem.heads).to(wide)
    score, value = problem.encoding.score, problem.encoding.value
    if score is not None and score.replaces_product:
        logits = score(q, k, problem.grid, scale=problem.scale)
    else:
        logits = q @ k.mT * problem.scale
        if score is not None:
            logits = logits + score(q, k, problem.grid, scale=problem.scale)
    logits = logits.to(wide)  # float64 positions give float64 scores
    if score is not None and score.replaces_softmax:
        weights = logits.exp().masked_fill(~problem.grid.visible, 0.0)
    else:
        weights = masked_softmax(logits, problem.grid.visible)
    weights = torch.dropout(weights, problem.dropout, train=problem.dropout > 0)
    output = weights @ v
    if value is not None:
        output = output + value(weights, problem.grid)
    return output.to(problem.v.dtype)
