"""PyTorch's fused attention; heads that share keys are queries of one call where that is faster."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.encoding import repeat_heads
from posenc.grid import FARTHEST, Grid
from posenc.runtime import is_scripted, is_transformed

Mask = Bool[Tensor, "b h #Q K"] | Float[Tensor, "b h #Q K"]
"""True or a finite number where a query sees a key."""

FEW_QUERIES = 16
"""Queries of a head up to which reading keys and values takes most of the time."""

FOLDED = 64
"""Queries of all heads that share keys up to which keys are read once for all."""


def fused_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    mask: Mask | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "B H Q E"]:
    """``scaled_dot_product_attention`` with fewer heads of keys than of queries."""
    rows, mask = (q, mask) if causal or dropout else fold_heads(q, k, mask)
    if is_scripted():  # the older ONNX exporter knows no heads that share keys
        k, v = (repeat_heads(x, rows.shape[1]) for x in (k, v))
    output = scaled_dot_product_attention(
        *(rows, k, v),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=bool(rows.shape[1] != k.shape[1]),
    )
    return output if rows is q else output.reshape(*q.shape[:3], v.shape[3])


def fold_heads(
    q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"], mask: Mask | None = None
) -> tuple[Float[Tensor, "B g q D"], Mask | None]:
    """Few queries of the heads that share keys as queries of one head, and their mask.

    ``[B, G, H / G · Q, D]``; as they are where that gains nothing.
    """
    (batch, heads, queries, width), groups = q.shape, k.shape[1]
    most = FOLDED * groups // heads if q.device.type == "cpu" else 1
    if heads == groups or not are_few(q, most):
        return q, mask
    size = heads // groups * queries
    if mask is not None and (mask.shape[1] != 1 or mask.shape[2] != 1):
        shared = mask.shape[1] == 1
        each = mask.expand(-1, heads // groups if shared else heads, queries, -1)
        mask = each.reshape(len(mask), 1 if shared else groups, size, mask.shape[3])
    return q.reshape(batch, groups, size, width), mask


def are_few(q: Float[Tensor, "B H Q D"], most: int = FEW_QUERIES) -> bool:
    """True for one query, and for at most ``most`` outside of graphs, which may be dynamic."""
    if q.shape[2] == 1:
        return True
    traced = torch.compiler.is_compiling() or is_scripted() or is_transformed()
    return not traced and q.shape[2] <= most


def shares_few(q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B G K D"]) -> bool:
    """True if heads of few queries share keys, so that PyTorch's kernel reads these once."""
    return q.shape[1] != k.shape[1] and are_few(q)


def plainly_causal(grid: Grid) -> bool:
    """True if kernels' own causal flag (key index ≤ query index) equals the grid's mask."""
    return grid.band == (-FARTHEST, 0) and grid.shift == 0 and not grid.segmented
