"""PyTorch's fused attention; heads that share keys are queries of one call where that is faster."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention.problem.lowering import repeat_heads
from posenc.runtime import is_scripted


def fused_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    mask: Bool[Tensor, "b h #Q K"] | Float[Tensor, "b h #Q K"] | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "B H Q E"]:
    """``scaled_dot_product_attention`` with fewer heads of keys than of queries."""
    if shares_keys(q, k, mask):
        output = scaled_dot_product_attention(
            *(fold_heads(q, k), k, v), attn_mask=mask, dropout_p=dropout, scale=scale
        )
        return output.reshape(*q.shape[:3], v.shape[3])
    if is_scripted():  # the older ONNX exporter knows no heads that share keys
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    return scaled_dot_product_attention(
        *(q, k, v),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )


def shares_keys(q: Tensor, k: Tensor, mask: Tensor | None = None) -> bool:
    """True if heads of one query read the same keys and the same mask: these are read once then."""
    return q.shape[2] == 1 and q.shape[1] != k.shape[1] and (mask is None or mask.shape[1] == 1)


def fold_heads(q: Float[Tensor, "B H 1 D"], k: Float[Tensor, "B G K D"]) -> Tensor:
    """Heads that share keys as queries, ``[B, G, H / G, D]``."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
