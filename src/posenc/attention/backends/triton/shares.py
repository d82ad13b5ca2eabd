"""Launching the kernels for one query. Imports Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from posenc.attention.backends.triton.forms import (
    numbers,
    padded,
    precision_of,
    table,
    tokens,
    turn,
)
from posenc.attention.backends.triton.kernels.configs import KEYS_A_SHARE, PROGRAMS
from posenc.attention.backends.triton.kernels.decode import share_kernel, together_kernel

__all__ = ["attend_in_shares"]


def attend_in_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    bucket: Tensor | None,
    value_rows: Tensor | None,
    query_turn: Tensor | None,
    key_turn: Tensor | None,
    adjacent: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Keys are dealt to as many programs as keep the device busy; operands as in ``decode``."""
    batch, heads = q.shape[:2]
    key_heads, keys, width = k.shape[1], k.shape[2], v.shape[-1]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    # Query heads that read rows of their own cannot share a tile.
    programs = key_heads if value_rows is None or len(value_rows) == 1 else heads
    ratio = heads // programs
    shares = max(1, min(PROGRAMS // (batch * programs), triton.cdiv(keys, KEYS_A_SHARE)))
    partial = q.new_empty(batch, heads, shares, width, dtype=torch.float32)
    total = q.new_empty(batch, heads, shares, dtype=torch.float32)
    precision, _ = precision_of(q.dtype)
    kind = [q.dtype, q.shape[-1], width, ratio, bias is None, value_rows is None]
    kind += [] if key_turn is None else [key_turn.shape[-1], adjacent]
    share_kernel[(batch * programs * shares,)](
        tokens(q),
        tokens(k),
        tokens(v),
        None if bias is None else numbers(bias if bias.stride(-1) == 1 else bias.contiguous()),
        None if bucket is None else numbers(bucket.contiguous().unsqueeze(1)),
        None if value_rows is None else table(value_rows.contiguous()),
        turn(query_turn, q.shape[-1], adjacent=adjacent),
        turn(key_turn, k.shape[-1], adjacent=adjacent),
        partial,
        total,
        keys,
        shares,
        programs,
        programs // key_heads,
        scale,
        key=" ".join(map(str, kind)),
        ratio=ratio,
        rows=padded(ratio),
        precision=precision,
    )
    output = v.new_empty(batch, heads, 1, width)
    lse = q.new_empty(batch, heads, 1, dtype=torch.float32)
    together_kernel[(batch * heads,)](partial, total, output, lse, shares, width, padded(width))
    return output, lse
