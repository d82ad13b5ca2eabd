"""Launching the kernels for one query. Imports Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from posenc.attention.backends.triton.forms import (
    maybe,
    numbers,
    padded,
    precision_of,
    rotary,
    table,
    tokens,
)
from posenc.attention.backends.triton.kernels.configs import (
    FP_FUSION,
    KEYS_PER_SPLIT,
    PROGRAMS,
    tuning_key,
)
from posenc.attention.backends.triton.kernels.decode import combine_kernel, split_kernel
from posenc.attention.problem.record import KernelProblem

COMBINED = 16
"""Splits that are read at once when they are put together."""


def attend_split_k(x: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output and LSE; keys are dealt to as many programs as keep the device busy."""
    q, k, v, bias, value_rows, factors = x.q, x.k, x.v, x.terms.column, x.terms.value_rows, x.rotary
    bucket = x.pairs.tensors[0] if x.pairs.tensors else None
    batch, heads = q.shape[:2]
    key_heads, keys, width = k.shape[1], k.shape[2], v.shape[-1]
    # Query heads that read rows of their own cannot share a tile.
    programs = key_heads if value_rows is None or len(value_rows) == 1 else heads
    ratio = heads // programs
    splits = max(1, min(PROGRAMS // (batch * programs), triton.cdiv(keys, KEYS_PER_SPLIT)))
    partial = q.new_empty(batch, heads, splits, width, dtype=torch.float32)
    partial_lse = q.new_empty(batch, heads, splits, dtype=torch.float32)
    precision, _ = precision_of(q.dtype)
    kind = [q.dtype, q.shape[-1], width, ratio, bias is None, value_rows is None, x.softcap > 0]
    kind += [keys.bit_length(), batch.bit_length(), programs.bit_length(), q.device]
    kind += [] if factors.key_cosine is None else [factors.key_cosine.shape[-1], factors.adjacent]
    split_kernel[(batch * programs * splits,)](
        tokens(q),
        tokens(k),
        tokens(v),
        maybe(numbers, bias),
        None if bucket is None else numbers(bucket.unsqueeze(1)),
        maybe(table, value_rows),
        *(
            rotary(cosine, sine, q.shape[-1], adjacent=factors.adjacent)
            for cosine, sine in (
                (factors.query_cosine, factors.query_sine),
                (factors.key_cosine, factors.key_sine),
            )
        ),
        partial,
        partial_lse,
        keys,
        splits,
        programs,
        programs // key_heads,
        x.scale,
        x.softcap or None,
        key=tuning_key(*kind, tuned=True),
        ratio=ratio,
        rows=padded(ratio),
        precision=precision,
        enable_fp_fusion=FP_FUSION,
    )
    output = v.new_empty(batch, heads, 1, width)
    lse = q.new_empty(batch, heads, 1, dtype=torch.float32)
    combine_kernel[(batch * heads,)](
        partial,
        partial_lse,
        output,
        lse,
        splits,
        most=triton.next_power_of_2(splits),
        rows=min(triton.next_power_of_2(splits), COMBINED),
        width=width,
        block=padded(width),
        enable_fp_fusion=FP_FUSION,
    )
    return output, lse
