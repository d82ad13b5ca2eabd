"""Stick breaking and contextual positions: sums over the keys of a row, from tile to tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc.attention.backends.common.base import Problem, Result, Unsupported, kernel_gradients
from posenc.attention.backends.triton.band import FAR
from posenc.attention.backends.triton.op import features_together, keeping
from posenc.attention.backends.triton.operands import Operands, Options, empty_as
from posenc.attention.backends.triton.segments import marks_of
from posenc.attention.spacing import find_spacing, nearest_origin
from posenc.encoding import FusedScore, GateCounts, StickWeights

if TYPE_CHECKING:
    from posenc.attention.backends.triton.sums_launch import SumsCall

__all__ = ["NAMES", "SumsForm", "attend_with_sums", "sums_form"]

SumsForm = GateCounts | StickWeights

NAMES: dict[type, str] = {GateCounts: "counts", StickWeights: "sticks"}
"""Of the forms, in ``trial.KERNELS``."""

MOST = 4096
"""Vectors by count; the more there are, the coarser counts are."""


def sums_form(problem: Problem, form: FusedScore | None) -> SumsForm | Unsupported | None:
    """The score part with carried sums, or why the kernels cannot take it; None if it is no such.

    Reads the values of a layout with documents or padding, once.
    """
    if not isinstance(form, GateCounts | StickWeights):
        return None
    if problem.encoding.value is not None:
        return Unsupported("its kernels that carry sums have no place for a value part")
    if isinstance(form, GateCounts) and form.product.rows.shape[1] > MOST:
        return Unsupported(f"its kernels count to {MOST} at most")
    found = find_spacing(problem.grid)
    if isinstance(found, str):
        return Unsupported(found)
    if not found.ordered:
        return Unsupported("its kernels sum over keys in the order in which they are stored")
    return form


def attend_with_sums(problem: Problem, form: SumsForm, *, tuned: bool, lse: bool) -> Result:
    """Attention for a problem with such a score part."""
    q, grid = problem.q, problem.grid
    found = find_spacing(grid)
    assert not isinstance(found, str)  # by sums_form
    sticks = isinstance(form, StickWeights)
    products = None
    if isinstance(form, GateCounts):
        tokens, rows = form.product.tokens, form.product.rows
        products = (tokens.float() @ rows.float().mT).expand(*q.shape[:2], -1, -1)
    marks: Sequence[Tensor | None] = [None] * 4
    if grid.segmented:
        made = marks_of(grid, ordered=True)
        marks = (made.query_segment_ids, made.key_segment_ids, made.query_summary, made.key_summary)
    origin = nearest_origin(found.shift - q.shape[2] + 1, found.shift + problem.k.shape[2] - 1)
    first = -FAR if grid.window is None else min(max(-FAR, 1 - grid.window - origin), FAR)
    output, sums = attention_with_sums(
        q,
        problem.k,
        problem.v,
        products,
        *marks,
        torch.randint(2**31 - 1, (1,), device=q.device) if problem.dropout else None,
        [found.shift - origin, first, -1 if sticks else 0],
        isinstance(form, StickWeights) and form.rest_to_self,
        problem.scale,
        problem.dropout,
        tuned,
    )
    return Result(output, sums if lse else None)


@torch.library.custom_op("posenc::triton_sums", mutates_args=())
def attention_with_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    products: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    query_summary: Tensor | None,
    key_summary: Tensor | None,
    seed: Tensor | None,
    band: Sequence[int],
    rest_to_self: bool,
    scale: float,
    dropout: float,
    tuned: bool,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]``; and ``[B, H, Q]`` LSE, or the binary logarithm of what is left.

    Args: as ``SumsCall``; ``band``: origin, first and last as in ``Options``.
    """
    # fmt: off
    x = (
        q, k, v, products, query_segment_ids, key_segment_ids, query_summary, key_summary, seed,
    )
    # fmt: on
    with torch.cuda.device(q.get_device()):
        return _call(x, band, rest_to_self, scale, dropout, tuned).forward()


@attention_with_sums.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_as(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("posenc::triton_sums_backward", mutates_args=())
def backward_with_sums(
    gradient: Tensor,
    output: Tensor,
    lse: Tensor,
    operands: Sequence[Tensor | None],
    band: Sequence[int],
    rest_to_self: bool,
    scale: float,
    dropout: float,
    tuned: bool,
) -> list[Tensor]:
    """Gradients of queries, keys, values, and of products if there are any.

    Args:
        gradient: of the output; output, lse: results of ``attention_with_sums``.
        operands: of that, in its order.
    """
    with torch.cuda.device(gradient.get_device()):
        call = _call(operands, band, rest_to_self, scale, dropout, tuned)
        return call.backward(features_together(gradient), output, lse)


@backward_with_sums.register_fake
def _(
    gradient: Tensor, output: Tensor, lse: Tensor, operands: Sequence[Tensor | None], *rest: Any
) -> list[Tensor]:
    q, k, v, products = operands[:4]
    found = [empty_as(x, x.shape[-1]) for x in (q, k, v) if x is not None]
    return [*found, *([] if products is None else [products.new_empty(products.shape)])]


def _call(
    tensors: Sequence[Tensor | None],
    band: Sequence[int],
    rest_to_self: bool,
    scale: float,
    dropout: float,
    tuned: bool,
) -> SumsCall:
    from posenc.attention.backends.triton.sums_launch import SumsCall

    q, k, v, products, query_ids, key_ids, query_summary, key_summary, seed = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    x = Operands(
        features_together(q),
        features_together(k),
        features_together(v),
        query_segment_ids=query_ids,
        key_segment_ids=key_ids,
        query_summary=query_summary,
        key_summary=key_summary,
        seed=seed,
    )
    origin, first, last = band
    options = Options(origin, first, last, False, None, scale, dropout, tuned=tuned)
    return SumsCall(x, options, products, rest_to_self)


COUNT = 9
"""Tensors among the arguments of ``attention_with_sums``."""


def _differentiate(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under checkpointing, reading computes it again
    operands, (output, lse) = list(saved[:COUNT]), saved[COUNT:]
    found = backward_with_sums(gradient, output, lse, operands, *ctx.rest)
    others: list[None] = [None] * (COUNT + len(ctx.rest) - len(found))
    return (*found, *others)


attention_with_sums.register_autograd(
    kernel_gradients(_differentiate), setup_context=keeping(COUNT)
)
