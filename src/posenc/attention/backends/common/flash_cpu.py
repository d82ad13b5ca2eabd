"""PyTorch's fused CPU kernel with its LSE; operands are checked here, since the kernel does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.common.fused import fold_heads
from posenc.errors import ArgumentError

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_forward(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    mask: Float[Tensor, "b h #Q K"] | None = None,
    *,
    causal: bool = False,
    scale: float = 1.0,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q"]]:
    """Softmax of ``scale · q·k + mask`` applied to the values, and LSE.

    Where the mask is -inf for all keys both are 0.

    Args:
        causal: key indices beyond that of the query are masked.

    Raises:
        ArgumentError: when operands do not fit together.
    """
    mask = _check(q, k, v, mask)
    q, k, v = _rows(q), _rows(k), _rows(v)
    result: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, mask, causal, scale)
    return result


def prepare_flash(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K E"],
    mask: Float[Tensor, "b h #Q K"] | None = None,
    *,
    causal: bool,
    scale: float,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """``flash_forward`` of operands of the same shapes and strides, without gradients.

    None where the kernel does not take them as they are.
    """
    rows, mask = (q, mask) if causal else fold_heads(q, k, mask)
    if not (k.shape == v.shape and all(_rows(x) is x for x in (rows, k, v))):
        return None
    mask, folded = _check(rows, k, v, mask), rows.shape
    if rows is q:
        return lambda q, k, v: _FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = q.reshape(folded)
        output, lse = _FORWARD(rows, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return output.reshape(q.shape), lse.reshape(q.shape[:3])

    return attend


class _Flash(torch.autograd.Function):
    """The fused kernel with gradients through the LSE, which its own backward pass lacks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, output, lse)
        ctx.options = causal, scale
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> Any:
        q, k, v, mask, output, lse = ctx.saved_tensors
        causal, scale = ctx.options
        gradient = torch.zeros_like(output) if gradient is None else gradient
        operands = [gradient, q, k, v, output]
        if of_lse is not None:
            # The kernel subtracts Σ gradient · output from each product of gradient and value: one
            # more feature, in which values are 0 and outputs 1, makes it the LSE's gradient less.
            extra = of_lse.unsqueeze(-1).to(gradient.dtype)
            ends = [
                -extra,
                *(torch.zeros_like(x[..., :1]) for x in (q, k, v)),
                torch.ones_like(extra),
            ]
            operands = [torch.cat(pair, dim=-1) for pair in zip(operands, ends, strict=True)]
        gradients = _BACKWARD(*operands, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return *(x[..., : q.shape[-1]] for x in gradients), None, None, None


def _rows(x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L D"]:
    """Copy ``x`` unless features are contiguous and tokens do not overlap.

    The kernel does not check strides.
    """
    tokens, width = x.shape[-2:]
    features_are = x.stride(-1) == 1 or width == 1
    tokens_are = x.stride(-2) >= width or tokens == 1
    return x if features_are and tokens_are else x.clone(memory_format=torch.contiguous_format)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask, its keys side by side.

    Raises:
        ArgumentError: when operands do not fit together, which the kernel does not check.
    """
    batch, heads, queries, width = q.shape
    wanted = (batch, k.shape[1], k.shape[2], width)
    fit = tuple(k.shape) == wanted and tuple(v.shape) == wanted
    fit &= heads % max(1, k.shape[1]) == 0
    if mask is not None:
        pairs = (batch, heads, queries, k.shape[2])
        fit &= all(mine in (1, full) for mine, full in zip(mask.shape, pairs, strict=True))
    if not fit:
        shapes = [list(x.shape) for x in (q, k, v, mask) if x is not None]
        raise ArgumentError(
            "q, k, v and mask",
            expected="operands of one batch size and head width, and heads that divide",
            got=shapes,
            remedy="Check that the encoding was made for these heads.",
        )
    if mask is None or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    return mask.contiguous()
