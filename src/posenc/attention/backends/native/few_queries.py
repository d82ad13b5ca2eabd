"""Few queries, for which keys are read once (csrc/few_rows.h), and one query without a plan."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.fused import FEW_QUERIES
from posenc.attention.backends.native.arguments import contiguous_rows, empty_like_tokens
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import COperand, CProblem, CTokens
from posenc.attention.problem.problem import Problem
from posenc.encoding import BucketedTerms, StructuredScore

ROWS = 64
"""Largest number of queries in all heads that share keys."""


def are_few_rows(problem: Problem) -> bool:
    """True if the heads that share keys have few queries, and no terms but by offset.

    The backward pass reads keys for each head, as do graphs, which serve any number of queries.
    """
    (_, heads, queries, _), groups = problem.q.shape, problem.k.shape[1]
    if torch.compiler.is_compiling() and queries > 1:
        return False
    if queries > FEW_QUERIES or queries * heads // groups > ROWS or problem.dropout:
        return False
    graded = torch.is_grad_enabled() and problem.q.requires_grad
    return not graded and all(map(_is_by_offset, problem.lowered or ()))


def _is_by_offset(term: StructuredScore) -> bool:
    return isinstance(term, BucketedTerms) and term.right is None and term.column is None


def attend_query(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    bias: Float[Tensor, "b h 1 K"] | None,
    *,
    scale: float,
    sinks: Float[Tensor, " H"] | None,
    softcap: float | None,
) -> Float[Tensor, "B H 1 E"]:
    """Attention to all keys, which are read once for all heads that share them."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    (batch, heads, _, dim), (groups, keys) = q.shape, k.shape[1:3]
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    out = empty_like_tokens(v, (batch, heads, 1, v.shape[3]))
    lse = q.new_empty(batch, heads, dtype=torch.float64)
    interval = (ctypes.c_int32 * 3)(0, keys, 0)  # the first key, the end, and its offset
    low, size = ctypes.addressof(interval), ctypes.sizeof(ctypes.c_int32)
    problem = CProblem(
        batch=batch,
        heads=heads,
        groups=groups,
        queries=1,
        keys=keys,
        dim=dim,
        value_dim=v.shape[3],
        scale=scale,
        softcap=softcap or 0.0,
        q=CTokens.of(q),
        k=CTokens.of(k),
        v=CTokens.of(v),
        out=CTokens.of(out),
        lse=lse.data_ptr(),
        low=low,
        high=low + size,
        base=low + 2 * size,
    )
    if bias is not None:
        bias = contiguous_rows(bias.to(dtype))
        problem.terms.bias_by_offset = COperand(value=CTokens.of(bias.mT), rows=keys, features=1)
    if sinks is not None:
        sinks = sinks.double().expand(batch, heads).contiguous()
        problem.sinks = sinks.data_ptr()
    library().call("forward", problem, dtype)
    return out
