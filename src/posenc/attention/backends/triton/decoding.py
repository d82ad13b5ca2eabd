"""One query a row against many keys: all terms become one bias a key and one value row a key."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Result
from posenc.attention.backends.common.sinks import beside_sinks
from posenc.attention.backends.triton.op import TRITON
from posenc.attention.backends.triton.posing import single_query_record
from posenc.attention.problem.given_terms import given_encoding, map_term
from posenc.attention.problem.lowering import repeat_heads
from posenc.attention.problem.problem import Problem


def attend_single_query(problem: Problem, *, lse: bool) -> Result:
    """Attention for any layout: offsets are looked up key by key."""
    (batch, heads), grid, encoding = problem.q.shape[:2], problem.grid, problem.encoding
    q, k = problem.q, problem.k
    if problem.lowered is not None:
        encoding = given_encoding(map_term(Tensor.float, term) for term in problem.lowered)
    elif encoding.score is not None:
        q, k = q.float(), repeat_heads(k, heads).float()
    bias = None
    if encoding.score is not None:
        bias = encoding.score(q, k, grid, scale=problem.scale).squeeze(2).float()  # [b, H, K]
    if not grid.dense:
        hidden = ~grid.visible[:, :, 0]
        blank = torch.zeros_like(hidden, dtype=torch.float32) if bias is None else bias
        bias = blank.masked_fill(hidden, -torch.inf)
    bias = None if bias is None else bias.expand(batch, heads, -1)
    value = None if encoding.value is None else encoding.value.lower(grid)
    result = Result(*TRITON.attend(single_query_record(problem, bias, value)))
    if problem.sinks is not None:
        return beside_sinks(result, problem.sinks, lse=lse)
    return result if lse else result._replace(lse=None)
