"""The kernels as operators that autograd, ``torch.compile`` and checkpointing know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.kernel_call import (
    KernelCall,
    ceil_div,
    contiguous_rows,
    is_whole,
)
from posenc.attention.backends.native.library import Tokens
from posenc.attention.backends.native.pairs import pair_gradients, sum_to_tensors
from posenc.attention.spans import Spans

TERMS = (
    "q_factor",
    "k_factor",
    "line",
    "column",
    "left",
    "left_rows",
    "right",
    "right_rows",
    "value_rows",
)
"""Arguments of the structured form that have gradients, in the order of ``native``."""


def compute_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_factor: Tensor | None,
    k_factor: Tensor | None,
    line: Tensor | None,
    column: Tensor | None,
    left: Tensor | None,
    left_rows: Tensor | None,
    right: Tensor | None,
    right_rows: Tensor | None,
    value_rows: Tensor | None,
    bucket: Tensor | None,
    intervals: Tensor | None,
    pairs: Sequence[Tensor],
    rotary: Sequence[Tensor],
    scale: float,
    place: Sequence[int],
    dropout: float,
    seed: int,
    wants: Sequence[bool],
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, in float64.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, G, K, D]``; v: ``[B, G, K, E]``.
        q_factor: ``[B|1, H, Q, R]`` in the kernel's dtype, with k_factor ``[B|1, H, K, R]``: their
            products are summands.
        line: ``[H|1, W]``, the bias of each offset; column: ``[B|1, H, K]``.
        left: ``[B, H, Q, F]``, with ``left_rows`` ``[H|1, N, F]``; right and value_rows alike.
            None with rows: q, and k of as many heads.
        bucket: ``[W]`` int64, the bucket of each offset. None between images, where
            ``left_rows`` are those of each offset along the columns, then along the rows.
        intervals: ``[3, B|1, Q]`` int32: each query sees the keys from the first number up to the
            second, and the offset of key j is j plus the third. None: of a regular grid.
        pairs: tensors of the term outside the structured form of the given ``kind``, see
            ``pairs``; none for ``""``.
        rotary: cosines and sines ``[B|1, H|1, Q, T]`` of the angles that pairs of the queries'
            features are rotated by, and those of keys, in the kernel's dtype; none for no rotation.
        place: shift of a regular grid and the smallest and largest offset that it shows, the first
            offset of ``line`` and ``bucket``, for images the keys a row and how far the offset's
            index jumps after each (0 for none), the most blocks of queries that gradients of keys
            are summed in apart, and whether pairs are of adjacent features. All offsets may be
            counted from another than 0, see ``Place.origin``.
        wants: whether gradients of line and column will be wanted.
    """
    call = KernelCall(
        *(q, k, v, q_factor, k_factor, line, column),
        *(bucket, intervals, scale, place, dropout, seed),
    )
    call.add_terms(left, left_rows, right, right_rows, value_rows)
    call.add_pairs(kind, pairs)
    call.add_rotary(rotary)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float64)
    x = call.problem
    x.out, x.lse = Tokens.of(out), lse.data_ptr()
    x.splits = max(
        call.splits, min(ceil_div(2 * torch.get_num_threads(), x.heads * x.chunks), call.tiles)
    )
    library().call("forward", x, call.dtype)
    return out, lse


native = torch.library.custom_op("posenc::native", mutates_args=())(compute_output)


@native.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)
    return v.new_empty(*q.shape[:3], v.shape[-1]), lse


def compute_gradients(
    gradient: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_factor: Tensor | None,
    k_factor: Tensor | None,
    line: Tensor | None,
    column: Tensor | None,
    left: Tensor | None,
    left_rows: Tensor | None,
    right: Tensor | None,
    right_rows: Tensor | None,
    value_rows: Tensor | None,
    bucket: Tensor | None,
    intervals: Tensor | None,
    pairs: Sequence[Tensor],
    rotary: Sequence[Tensor],
    scale: float,
    place: Sequence[int],
    dropout: float,
    seed: int,
    wants: Sequence[bool],
    kind: str,
    part: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and the terms that are there, in order; empty where not wanted.

    Args:
        part: whether output and LSE are over more keys than these.
    """
    call = KernelCall(
        *(q, k, v, q_factor, k_factor, line, column),
        *(bucket, intervals, scale, place, dropout, seed),
    )
    call.add_terms(left, left_rows, right, right_rows, value_rows)
    call.add_pairs(kind, pairs)
    call.add_rotary(rotary)
    x, gradient, out = call.problem, *(call.keep(contiguous_rows(t)) for t in (gradient, out))
    x.part = part
    batch, heads, groups, splits = x.batch, x.heads, x.groups, call.splits
    x.gradient, x.out, x.lse, x.splits = Tokens.of(gradient), Tokens.of(out), lse.data_ptr(), splits
    dq = torch.empty(q.shape, dtype=q.dtype)
    whole = splits == 1 and heads == groups
    dk, dv = (
        torch.empty(splits, batch, heads, *t.shape[2:], dtype=t.dtype if whole else call.dtype)
        for t in (k, v)
    )
    x.dq, x.dk, x.dv = Tokens.of(dq), Tokens.of(dk[0]), Tokens.of(dv[0])
    x.dk_split, x.dv_split = dk.stride(0), dv.stride(0)
    parts = x.chunks * splits
    given = (q_factor, k_factor, line, column, left, left_rows, right, right_rows, value_rows)
    terms = {name: term for name, term in zip(TERMS, given, strict=True) if term is not None}
    found = _room_for_terms(call, terms, parts, wants)
    of_pairs = pair_gradients(kind, x, call.pairs, parts)
    library().call("backward", x, call.dtype)
    gradients = [dq]
    for t, partial in ((k, dk), (v, dv)):
        summed = partial[0] if splits == 1 else partial.sum(0)
        if heads != groups:
            summed = summed.view(batch, groups, -1, *summed.shape[2:]).sum(2)
        gradients.append(summed.to(t.dtype))
    gradients += [_summed(name, found[name], term, call.spans) for name, term in terms.items()]
    return gradients + sum_to_tensors(of_pairs, pairs)


def _room_for_terms(
    call: KernelCall, terms: dict[str, Tensor], parts: int, wants: Sequence[bool]
) -> dict[str, Tensor]:
    """The tensors that the kernel writes the parts of the terms' gradients to, or adds them to."""
    x, dtype, splits = call.problem, call.dtype, call.splits
    shapes: dict[str, tuple[int, ...]] = {
        "line": (parts, x.heads, x.bias_by_offset_count),
        "column": (splits, x.batch, x.heads, x.keys),
        "left_rows": (parts, x.heads, x.map.buckets, x.left.features),
        "right_rows": (parts, x.heads, x.map.buckets, x.right.features),
        "value_rows": (parts, x.heads, x.map.buckets, x.value_dim),
    }
    unwanted = {name for name, want in zip(("line", "column"), wants, strict=True) if not want}
    found = {}
    for name, term in terms.items():
        if name in unwanted:
            found[name] = term.new_empty(0)
            continue
        parts_of_keys = splits if name in ("right", "k_factor") else 1
        shape = shapes.get(name, (parts_of_keys, x.batch, *term.shape[1:]))
        make = torch.zeros if name == "line" else torch.empty
        if name.endswith("factor"):
            room = _in_order(term, parts_of_keys, x.batch)
        else:
            room = make(shape, dtype=torch.float64 if name == "column" else dtype)
        found[name] = room
        match name:
            case "line":
                x.bias_by_offset_gradient = room.data_ptr()
            case "column":
                x.column_gradient = room.data_ptr()
            case "left_rows":
                x.left.rows_gradient = room.data_ptr()
            case "right_rows":
                x.right.rows_gradient = room.data_ptr()
            case "value_rows":
                x.value_gradient = room.data_ptr()
            case "q_factor":
                x.dq_factor = Tokens.of(room[0])
            case "k_factor":
                x.dk_factor, x.dk_factor_split = Tokens.of(room[0]), room.stride(0)
            case "left":
                x.left.tokens_gradient = Tokens.of(room[0])
            case "right":
                x.right.tokens_gradient, x.right_split = Tokens.of(room[0]), room.stride(0)
    return found


def _in_order(term: Tensor, parts: int, batch: int) -> Tensor:
    """Room ``[parts, B, H, L, R]``, each token's heads side by side if those of the term are."""
    heads, tokens, rank = term.shape[1:]
    if term.stride(1) < term.stride(2):
        return term.new_empty(parts, batch, tokens, heads, rank).transpose(2, 3)
    return term.new_empty(parts, batch, heads, tokens, rank)


def _summed(name: str, partial: Tensor, like: Tensor, spans: Spans | None) -> Tensor:
    """The gradient of a term from the parts of it."""
    if not partial.numel():
        return partial
    summed = partial[0] if len(partial) == 1 else partial.sum(0)
    if summed.shape[0] != like.shape[0]:  # shared by heads, or by batch rows
        summed = summed.sum(0, keepdim=True)
    if name.endswith("rows") and spans is not None and not is_whole(spans, like):
        summed = torch.zeros(like.shape, dtype=summed.dtype).index_add_(1, spans.buckets, summed)
    if name.endswith("factor") and (len(partial) > 1 or len(like) < partial.shape[1]):
        return _in_order(like, 1, len(like))[0].copy_(summed)
    return summed.to(like.dtype)


native_backward = torch.library.custom_op("posenc::native_backward", mutates_args=())(
    compute_gradients
)


@native_backward.register_fake
def _(gradient: Tensor, out: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    found = [tensor.new_empty(tensor.shape) for tensor in given[:12] if tensor is not None]
    if given[3] is not None:
        found[3:5] = (_in_order(tensor, 1, len(tensor))[0] for tensor in given[3:5])
    at = 3 + 2 * (given[3] is not None)
    for tensor, wanted in zip(given[5:7], given[-3], strict=True):
        if tensor is not None:
            if not wanted:
                found[at] = tensor.new_empty(0)
            at += 1
    return found + [tensor.new_empty(tensor.shape) for tensor in given[14]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:14], *inputs[14])
    ctx.rest = inputs[15:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,
    gradient: Tensor,
    _: Tensor | None = None,
    *,
    compute: Callable[..., list[Tensor]] = native_backward,
    part: bool = False,
) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    pairs, wants = kept[16:], ctx.rest[-2]
    found = iter(compute(gradient, *kept[:16], pairs, *ctx.rest, part))
    gradients = [None if tensor is None else next(found) for tensor in kept[2:14]]
    for at, wanted in zip((5, 6), wants, strict=True):
        if not wanted:
            gradients[at] = None
    rotary, *others = ctx.rest
    unwanted = ([None for _ in rotary], *(None for _ in others))
    return (*gradients, None, None, list(found), *unwanted)


native.register_autograd(kernel_gradients(_differentiate), setup_context=_keep)


class NativeAttention(torch.autograd.Function):
    """``native`` for autograd alone, which costs less than the dispatch of an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE; ``inputs`` are those of ``native``, but with the pairs last."""
        given = (*inputs[:14], inputs[21:], *inputs[14:21])
        output = compute_output(*given)
        _keep(ctx, given, output)
        return output

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> Any:
        given = gradient.resolve_neg()
        *gradients, pairs = _differentiate(ctx, given, compute=compute_gradients)[:15]
        return *gradients, *(None for _ in ctx.rest), *pairs


class NativePart(torch.autograd.Function):
    """``native`` with output and LSE over more keys given: only its backward pass is computed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor, *inputs: Any) -> Tensor:
        """Zeros for the given output; ``inputs`` are those of ``NativeAttention``."""
        tensors, ctx.rest = inputs[:14], inputs[14:21]
        ctx.save_for_backward(output, lse, *tensors, *inputs[21:])
        ctx.set_materialize_grads(False)
        return output.new_zeros(()).expand(output.shape)

    @staticmethod
    @kernel_gradients
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *gradients, pairs = _differentiate(ctx, gradient, part=True)[:15]
        return None, None, *gradients, *(None for _ in ctx.rest), *pairs
