"""Attention of one query per head with a materialised bias, for decoding."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.native.arguments import contiguous_rows, empty_like_tokens
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import COperand, CProblem, CTokens


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
