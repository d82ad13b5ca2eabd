"""The kernels as operators that autograd, ``torch.compile`` and checkpointing know.

They take ``band = [origin, first, last, zero, causal, window]``, as in ``Options``, -1 for no
window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.triton.operands import (
    DIFFERENTIABLE,
    TENSORS,
    Ends,
    Operands,
    Options,
    empty_as,
)

if TYPE_CHECKING:
    from posenc.attention.backends.triton.launch import Call

__all__ = ["attention", "features_together", "keeping"]

COUNT = len(TENSORS)

CURVE = ("curve_numbers", "curve_slope", "curve_intercept")

BY_OFFSET = ("bias_by_offset", "left_rows", "right_rows", "value_rows", *CURVE)
"""Operands whose gradients are computed if they are wanted only."""


@torch.library.custom_op("posenc::triton", mutates_args=())
def attention(
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
    query_factor: Tensor | None,
    key_factor: Tensor | None,
    curve_numbers: Tensor | None,
    curve_rates: Tensor | None,
    curve_slope: Tensor | None,
    curve_intercept: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    query_summary: Tensor | None,
    key_summary: Tensor | None,
    query_rotary: Tensor | None,
    key_rotary: Tensor | None,
    curve_knots: Tensor | None,
    seed: Tensor | None,
    band: Sequence[int],
    adjacent: bool,
    scale: float,
    dropout: float,
    tuned: bool,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]``, and the logarithms of the sums of weights ``[B, H, Q]``.

    Args: as ``Operands`` and ``Options``.
    """
    from posenc.attention.backends.triton.launch import Call

    # fmt: off
    x = _ready(
        q, k, v, bias_by_offset, left, left_rows, right, right_rows, column, value_rows,
        query_factor, key_factor, curve_numbers, curve_rates, curve_slope, curve_intercept,
        query_segment_ids, key_segment_ids, query_order, key_order, query_summary, key_summary,
        query_rotary, key_rotary, curve_knots, seed,
    )
    # fmt: on
    with torch.cuda.device(q.get_device()):
        return Call(x, _options(band, adjacent, scale, dropout, tuned)).forward()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    output = empty_as(q, v.shape[-1])
    return output, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("posenc::triton_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    output: Tensor,
    lse: Tensor,
    operands: Sequence[Tensor | None],
    band: Sequence[int],
    adjacent: bool,
    scale: float,
    dropout: float,
    tuned: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those operands that are there, in order.

    Args:
        gradient: of the output; output, lse: results of ``attention``.
        operands: of ``attention``, in its order.
        wanted: whether those of ``BY_OFFSET`` are wanted; the others are empty.
    """
    from posenc.attention.backends.triton.launch import Call

    x = _ready(*operands)
    with torch.cuda.device(x.q.get_device()):
        call = Call(
            x,
            _options(band, adjacent, scale, dropout, tuned),
            gradient=features_together(gradient),
            output=output,
            lse=lse,
        )
        found = _gradients(call, dict(zip(BY_OFFSET, wanted, strict=True)))
    present = [name for name in DIFFERENTIABLE if getattr(x, name) is not None]
    return [found.get(name, x.q.new_empty(0)) for name in present]


@attention_backward.register_fake
def _(
    gradient: Tensor, output: Tensor, lse: Tensor, operands: Sequence[Tensor | None], *rest: Any
) -> list[Tensor]:
    wanted = dict(zip(BY_OFFSET, rest[-1], strict=True))
    return [
        _empty_gradient(name, x) if wanted.get(name, True) else x.new_empty(0)
        for name, x in zip(DIFFERENTIABLE, operands, strict=False)
        if x is not None
    ]


def _empty_gradient(name: str, x: Tensor) -> Tensor:
    of_tokens = name not in (*BY_OFFSET, "column", "curve_rates")
    return empty_as(x, x.shape[-1]) if of_tokens else x.new_empty(x.shape)


def _gradients(call: Call, wanted: dict[str, bool]) -> dict[str, Tensor]:
    """Gradients by the names of the operands; only those that are wanted of tables."""
    from posenc.attention.backends.triton.offsets_launch import curve_gradients, offset_gradients

    x = call.x
    of_queries, query_sums, weights = call.tokens(flip=False)
    of_keys, key_sums, _ = call.tokens(flip=True)
    found: dict[str, Tensor | None] = {
        "q": of_queries.q,
        "k": of_keys.k,
        "v": of_keys.v,
        "left": of_queries.left,
        "right": of_keys.right,
        "column": of_keys.column,
        "query_factor": of_queries.query_factor,
        "key_factor": of_keys.key_factor,
        "curve_rates": of_queries.curve_rates,
    }
    bias_wanted = wanted["bias_by_offset"]
    sources = {
        "left_rows": (x.left, query_sums),
        "right_rows": (x.right, key_sums),
        "value_rows": (call.gradient, weights),
    }
    for name, (vectors, sums) in sources.items():
        rows: Tensor | None = getattr(x, name)
        if rows is None or vectors is None or not wanted[name]:
            continue
        takes_bias = bias_wanted and name != "value_rows"
        of_bias, of_rows = offset_gradients(call, name, bias_wanted=takes_bias)
        if takes_bias:
            found["bias_by_offset"], bias_wanted = of_bias, False
        if of_rows is not None:
            found[name] = _with_ends(of_rows, sums, vectors).to(rows.dtype)
    if bias_wanted:
        found["bias_by_offset"], _ = offset_gradients(call, None, bias_wanted=True)
    if any(wanted[name] for name in CURVE):
        found.update(zip(CURVE, curve_gradients(call), strict=True))
    of_bias = found.get("bias_by_offset")
    if of_bias is not None and query_sums is not None:
        of_bias[:, 0] += query_sums.first.sum((0, 2))
        of_bias[:, -1] += query_sums.last.sum((0, 2))
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _with_ends(rows: Tensor, sums: Ends | None, vectors: Tensor) -> Tensor:
    """Gradients of rows ``[h, N, F]`` with those at both ends added, from sums a token."""
    if sums is None:
        return rows
    wide = vectors.float()
    for entry, each in ((0, sums.first), (rows.shape[1] - 1, sums.last)):
        added = (each.unsqueeze(-2) @ wide).squeeze(-2).sum(0)
        rows[:, entry] += added.sum(0, keepdim=True) if rows.shape[0] == 1 else added
    return rows


def _options(
    band: Sequence[int], adjacent: bool, scale: float, dropout: float, tuned: bool
) -> Options:
    origin, first, last, zero, causal, window = band
    chosen = None if window < 0 else window
    return Options(origin, first, last, bool(causal), chosen, scale, dropout, adjacent, tuned, zero)


def _ready(*tensors: Tensor | None) -> Operands:
    """Operands in strides that the kernels can read."""
    found: dict[str, Any] = {}
    for name, x in zip(TENSORS, tensors, strict=True):
        if x is None:
            found[name] = None
        elif x.dim() == 4 or name == "column":
            found[name] = features_together(x)
        else:
            found[name] = x.contiguous()
    return Operands(**found)


def features_together(x: Tensor) -> Tensor:
    """The tensor in a memory order that the kernels can read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def keeping(count: int) -> Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], None]:
    """A function that keeps results and arguments, the first ``count`` of which are tensors."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.rest = inputs[count:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    return keep


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under checkpointing, reading computes it again
    operands, (output, lse) = list(saved[:COUNT]), saved[COUNT:]
    needed = dict(zip(TENSORS, ctx.needs_input_grad, strict=False))
    wanted = [needed[name] for name in BY_OFFSET]
    found = iter(attention_backward(gradient, output, lse, operands, *ctx.rest, wanted))
    gradients: list[Tensor | None] = []
    for name, operand in zip(TENSORS, operands, strict=True):
        given = next(found) if operand is not None and name in DIFFERENTIABLE else None
        gradients.append(given if needed[name] else None)
    return (*gradients, *[None for _ in ctx.rest])


attention.register_autograd(kernel_gradients(_differentiate), setup_context=keeping(COUNT))
