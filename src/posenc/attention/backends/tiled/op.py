"""The engine as operators that autograd, ``torch.compile`` and checkpointing know.

Both take ``band = [shift, causal, window, max_distance]`` of a regular grid, -1 where there is no
window or no such distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.tiled import engine
from posenc.attention.backends.tiled.band import Band
from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.passes import Saved
from posenc.attention.backends.tiled.sdpa_cpu import Partial
from posenc.attention.backends.tiled.tiles import Dropout

TENSORS = tuple(field.name for field in fields(Operands) if field.name != "scale")
COUNT, BIAS = len(TENSORS), TENSORS.index("bias_by_offset")


@torch.library.custom_op("posenc::tiled", mutates_args=())
def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_by_offset: Tensor | None,
    left: Tensor | None,
    left_rows: Tensor | None,
    right: Tensor | None,
    right_rows: Tensor | None,
    column: Tensor | None,
    value_rows: Tensor | None,
    scale: float,
    band: Sequence[int],
    dropout: float,
    seed: int,
    bias_wanted: bool,
    keep_ahead: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over a regular grid: output, LSE, and the same for the keys far ahead.

    All but the first are for the backward pass.

    Args: as ``Operands``; ``bias_wanted`` tells that the gradient of the offset bias will be
        wanted; ``keep_ahead`` keeps the last two, which are empty otherwise.
    """
    x = Operands(
        q, k, v, bias_by_offset, left, left_rows, right, right_rows, column, value_rows, scale
    )
    saved = engine.forward(
        x,
        _band(q, k, band),
        _dropout(dropout, seed),
        bias_wanted=bias_wanted,
        keep_ahead=keep_ahead,
    )
    whole, ahead = saved.whole, saved.ahead
    if ahead is None:
        ahead = Partial(q.new_empty(0), q.new_empty(0))
    # As the shapes below promise: strides of the fused kernel's results are its own.
    return whole.output.contiguous(), whole.lse.contiguous(), ahead.output, ahead.lse


def _band(q: Tensor, k: Tensor, band: Sequence[int]) -> Band:
    shift, causal, window, max_distance = band
    return Band.regular(
        q.shape[2],
        k.shape[2],
        shift=shift,
        causal=bool(causal),
        window=None if window < 0 else window,
        max_distance=None if max_distance < 0 else max_distance,
    )


def _dropout(probability: float, seed: int) -> Dropout | None:
    return Dropout(probability, seed) if probability else None


@tiled.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keep_ahead = terms[-1]
    output = v.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3])
    if keep_ahead:
        return output, lse, torch.empty_like(output), torch.empty_like(lse)
    return output, lse, q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("posenc::tiled_backward", mutates_args=())
def tiled_backward(
    gradient: Tensor,
    saved: Sequence[Tensor],
    operands: Sequence[Tensor | None],
    scale: float,
    band: Sequence[int],
    dropout: float,
    seed: int,
    bias_wanted: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and of the terms that are there, in order.

    Args:
        gradient: of the output; saved: results of ``tiled``; operands: of ``tiled``, in its order.
        bias_wanted: whether that of the offset bias is wanted; it is empty otherwise.
    """
    given: dict[str, Any] = dict(zip(TENSORS, operands, strict=True))
    x = Operands(**given, scale=scale)
    output, lse, *ahead = saved
    whole = Partial(output, lse)
    into = engine.backward(
        x,
        _band(x.q, x.k, band),
        Saved(whole, Partial(*ahead) if ahead[1].numel() else None),
        gradient,
        _dropout(dropout, seed),
        bias_wanted=bias_wanted,
    )
    into.q.mul_(scale)
    gradients = [getattr(into, name) for name, operand in given.items() if operand is not None]
    return [x.q.new_empty(0) if made is None else made.contiguous() for made in gradients]


@tiled_backward.register_fake
def _(
    gradient: Tensor, saved: Sequence[Tensor], operands: Sequence[Tensor | None], *rest: Any
) -> list[Tensor]:
    made = [x.new_empty(x.shape) for x in operands if x is not None]
    if operands[BIAS] is not None and not rest[-1]:
        made[BIAS] = gradient.new_empty(0)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, (*ctx.rest, _) = inputs[:COUNT], inputs[COUNT:]
    ctx.save_for_backward(*operands, *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # read once: under checkpointing, reading computes it again
    operands, saved = list(kept[:COUNT]), list(kept[COUNT:])
    made = iter(tiled_backward(gradient, saved, operands, *ctx.rest))
    gradients = [None if operand is None else next(made) for operand in operands]
    if not ctx.rest[-1]:
        gradients[BIAS] = None
    return (*gradients, None, None, None, None, None, None)


tiled.register_autograd(kernel_gradients(_differentiate), setup_context=_keep)


class TiledPart(torch.autograd.Function):
    """``tiled`` with output and LSE over more keys given: only its backward pass is computed.

    The band has to be without a distance beyond which buckets do not change: sums far away are
    found from the fact that gradients of logits over all keys sum to zero.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor, *inputs: Any) -> Tensor:
        """The given output; ``inputs`` are those of ``tiled``."""
        ctx.save_for_backward(*inputs[:COUNT], output, lse, *(output.new_empty(0) for _ in "ol"))
        ctx.rest = inputs[COUNT:-1]
        ctx.set_materialize_grads(False)
        return output.clone()

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *_differentiate(ctx, gradient)
