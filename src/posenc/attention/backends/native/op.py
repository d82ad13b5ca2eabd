"""The kernels as operators that autograd, ``torch.compile`` and checkpointing know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import PAD, Map, Problem, Tokens
from posenc.attention.backends.native.pairs import pair_gradients, set_pairs, sum_to_tensors
from posenc.attention.spans import Spans, spans_of

TERMS = (
    "down",
    "across",
    "line",
    "column",
    "left",
    "left_rows",
    "right",
    "right_rows",
    "value_rows",
)

PARTS, ITEMS = 32, 8
"""Sums of gradients over the batch and over blocks of queries at most, so that many threads have
work. They depend on the shape alone: results are the same for any number of threads."""


def compute_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    down: Tensor | None,
    across: Tensor | None,
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
        down: ``[B, H, Q, Y]``, summands by the row of a key in its image, with across
            ``[B, H, Q, X]``, by its column.
        line: ``[H|1, W]``, the bias of each offset; column: ``[B|1, H, K]``.
        left: ``[B, H, Q, F]``, with ``left_rows`` ``[H|1, N, F]``; right and value_rows alike.
            None with rows: q, and k of as many heads.
        bucket: ``[W]`` int64, the bucket of each offset.
        intervals: ``[3, B|1, Q]`` int32: each query sees the keys from the first number up to the
            second, and the offset of key j is j plus the third. None: of a regular grid.
        pairs: tensors of the term outside the structured form of the given ``kind``, see
            ``pairs``; none for ``""``.
        place: shift, causal and window (-1 for none) of a regular grid, the first offset of
            ``line`` and ``bucket``, for images the keys a row and how far the offset's index
            jumps after each (0 for none), and the most blocks of queries that gradients of keys
            are summed in apart.
        wants: whether gradients of line and column will be wanted.
    """
    call = _Call(
        q, k, v, down, across, line, column, bucket, intervals, scale, place, dropout, seed
    )
    call.add_terms(left, left_rows, right, right_rows, value_rows)
    call.add_pairs(kind, pairs)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float64)
    x = call.problem
    x.out, x.lse = Tokens.of(out), lse.data_ptr()
    x.splits = max(
        call.splits, min(_ceil(2 * torch.get_num_threads(), x.heads * x.chunks), call.tiles)
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
    down: Tensor | None,
    across: Tensor | None,
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
    call = _Call(
        q, k, v, down, across, line, column, bucket, intervals, scale, place, dropout, seed
    )
    call.add_terms(left, left_rows, right, right_rows, value_rows)
    call.add_pairs(kind, pairs)
    x, gradient = call.problem, call.keep(_rows(gradient))
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
    found: dict[str, Tensor] = {}
    if down is not None and across is not None:
        for name, term in (("down", down), ("across", across)):
            found[name] = torch.zeros(1, *term.shape, dtype=call.dtype)
        x.down_gradient, x.across_gradient = (found[name].data_ptr() for name in ("down", "across"))
    if line is not None:
        found["line"] = q.new_empty(0)
        if wants[0]:
            found["line"] = torch.zeros(parts, heads, line.shape[-1], dtype=call.dtype)
            x.line_gradient = found["line"].data_ptr()
    if column is not None:
        found["column"] = q.new_empty(0)
        if wants[1]:
            found["column"] = torch.empty(splits, batch, heads, x.keys, dtype=torch.float64)
            x.column_gradient = found["column"].data_ptr()
    for name, term, tokens in (("left", x.left, left), ("right", x.right, right)):
        if term.rows:
            shape = (parts, heads, x.map.buckets, term.features)
            found[f"{name}_rows"] = torch.empty(shape, dtype=call.dtype)
            term.rows_gradient = found[f"{name}_rows"].data_ptr()
        if tokens is not None:
            found[name] = torch.empty(
                1 if name == "left" else splits, *tokens.shape, dtype=call.dtype
            )
            term.tokens_gradient = Tokens.of(found[name][0])
    if right is not None:
        x.right_split = found["right"].stride(0)
    if value_rows is not None:
        shape = (parts, heads, x.map.buckets, x.value_dim)
        found["value_rows"] = torch.empty(shape, dtype=call.dtype)
        x.value_gradient = found["value_rows"].data_ptr()
    of_pairs = pair_gradients(kind, x, call.pairs, parts)
    library().call("backward", x, call.dtype)
    gradients = [dq]
    for t, partial in ((k, dk), (v, dv)):
        summed = partial[0] if splits == 1 else partial.sum(0)
        if heads != groups:
            summed = summed.view(batch, groups, -1, *summed.shape[2:]).sum(2)
        gradients.append(summed.to(t.dtype))
    given = (down, across, line, column, left, left_rows, right, right_rows, value_rows)
    for name, term_given in zip(TERMS, given, strict=True):
        if term_given is not None:
            gradients.append(_summed(name, found[name], term_given, call.spans))
    return gradients + sum_to_tensors(of_pairs, pairs)


def _summed(name: str, partial: Tensor, like: Tensor, spans: Spans | None) -> Tensor:
    """The gradient of a term from the parts of it."""
    if not partial.numel():
        return partial
    summed = partial[0] if len(partial) == 1 else partial.sum(0)
    if summed.shape[0] != like.shape[0]:  # shared by heads, or by batch rows
        summed = summed.sum(0, keepdim=True)
    if name.endswith("rows") and spans is not None and not _is_whole(spans, like):
        summed = torch.zeros(like.shape, dtype=summed.dtype).index_add_(1, spans.buckets, summed)
    return summed.to(like.dtype)


native_backward = torch.library.custom_op("posenc::native_backward", mutates_args=())(
    compute_gradients
)


@native_backward.register_fake
def _(gradient: Tensor, out: Tensor, lse: Tensor, *given: Any) -> list[Tensor]:
    found = [tensor.new_empty(tensor.shape) for tensor in given[:12] if tensor is not None]
    at = 3 + 2 * (given[3] is not None)
    for tensor, wanted in zip(given[5:7], given[-3], strict=True):
        if tensor is not None:
            if not wanted:
                found[at] = tensor.new_empty(0)
            at += 1
    return found + [tensor.new_empty(tensor.shape) for tensor in given[14]]


class _Call:
    """The arguments of a kernel, and all tensors that they point to."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        down: Tensor | None,
        across: Tensor | None,
        line: Tensor | None,
        column: Tensor | None,
        bucket: Tensor | None,
        intervals: Tensor | None,
        scale: float,
        place: Sequence[int],
        dropout: float,
        seed: int,
    ) -> None:
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self._kept: list[Tensor] = []
        self.spans: Spans | None = None
        self.pairs: list[Tensor] = []
        self.problem = x = Problem()
        (x.batch, x.heads, x.queries, x.dim), (x.groups, x.keys) = q.shape, k.shape[1:3]
        x.value_dim, x.scale, x.dropout, x.seed = v.shape[-1], scale, dropout, seed
        x.q, x.k, x.v = (Tokens.of(self.keep(_rows(t))) for t in (q, k, v))
        x.chunks = min(x.batch, _ceil(PARTS, x.heads))
        self.tiles = _ceil(x.queries, 256)
        shift, causal, window, first, period, jump, most = place
        self.splits = min(_ceil(ITEMS, x.heads * x.chunks), self.tiles, most)
        if intervals is None:
            intervals = regular_intervals(
                x.queries, x.keys, shift, bool(causal), window, period, jump
            )
        self.keep(intervals)
        x.low, x.high, x.base = (part.data_ptr() for part in intervals)
        x.rows_batch = 0 if intervals.shape[1] == 1 else x.queries
        x.period, x.jump = period, jump
        if down is not None and across is not None:
            down, across = (self.keep(t.to(self.dtype).contiguous()) for t in (down, across))
            x.down, x.across = down.data_ptr(), across.data_ptr()
        if line is not None:
            line = self.keep(line.to(self.dtype).contiguous())
            x.line, x.line_first, x.line_count = line.data_ptr(), first, line.shape[1]
            x.line_head = 0 if len(line) == 1 else line.shape[1]
        if column is not None:
            column = self.keep(column.to(torch.float64).contiguous())
            x.column, x.column_head = column.data_ptr(), column.stride(1)
            x.column_batch = 0 if len(column) == 1 else column.stride(0)
        if bucket is not None:
            self.spans = spans = spans_of(bucket)
            numbers = _padded(spans)
            x.map = Map(
                numbers.data_ptr() + 4 * PAD,
                spans.span_of.data_ptr(),
                spans.spans.data_ptr(),
                first,
                len(bucket),
                len(spans.buckets),
                first + spans.varying[0],
                first + spans.varying[1],
            )

    def keep(self, x: Tensor) -> Tensor:
        self._kept.append(x)
        return x

    def add_terms(
        self,
        left: Tensor | None,
        left_rows: Tensor | None,
        right: Tensor | None,
        right_rows: Tensor | None,
        value_rows: Tensor | None,
    ) -> None:
        x = self.problem
        for term, tokens, own, rows in (
            (x.left, left, x.q, left_rows),
            (x.right, right, x.k, right_rows),
        ):
            if rows is not None:
                rows = self._read(rows)
                term.tokens = own if tokens is None else Tokens.of(self.keep(_rows(tokens)))
                term.rows, term.features = rows.data_ptr(), rows.shape[-1]
                term.rows_head = 0 if len(rows) == 1 else rows.stride(0)
                x.map.buckets = rows.shape[1]
        if value_rows is not None:
            rows = self._read(value_rows)
            x.value_rows, x.value_head = rows.data_ptr(), 0 if len(rows) == 1 else rows.stride(0)

    def add_pairs(self, kind: str, pairs: Sequence[Tensor]) -> None:
        if kind == "mixing":  # all heads go together
            self.splits = 1
        self.pairs = [self.keep(x.to(self.dtype).contiguous()) for x in pairs]
        set_pairs(kind, self.problem, self.pairs)

    def _read(self, rows: Tensor) -> Tensor:
        """The rows of the buckets that the offsets meet, in their order; all, without a map."""
        rows = rows.to(self.dtype)
        if self.spans is not None and not _is_whole(self.spans, rows):
            rows = rows[:, self.spans.buckets]
        return self.keep(rows.contiguous())


def _is_whole(spans: Spans, rows: Tensor) -> bool:
    return spans.whole and len(spans.buckets) == rows.shape[1]


def _rows(x: Tensor) -> Tensor:
    """``x`` with contiguous features."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache(maxsize=64)
def _padded(spans: Spans) -> Tensor:
    number = spans.number
    return torch.cat([number[:1].expand(PAD), number, number[-1:].expand(PAD)])


@lru_cache(maxsize=64)
def regular_intervals(
    queries: int, keys: int, shift: int, causal: bool, window: int, period: int, jump: int
) -> Tensor:
    """Intervals of a regular grid, or of whole images that see each other (``period`` > 0)."""
    i = torch.arange(queries)
    if period:
        columns = period + jump  # offsets along an image row: queries' and keys' columns less one
        width = columns + 1 - period
        base = -(i // width) * columns - i % width + shift
        low, high = torch.zeros_like(i), torch.full_like(i, keys)
        return torch.stack([low, high, base]).unsqueeze(1).to(torch.int32)
    low = torch.zeros_like(i) if window < 0 else (i - shift - window + 1).clamp(0, keys)
    last = i - shift + 1 if causal else (i - shift + window if window >= 0 else i * 0 + keys)
    high = last.clamp(0, keys)
    return torch.stack([low, high, shift - i]).unsqueeze(1).to(torch.int32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:14], *inputs[14])
    ctx.rest = inputs[15:]
    ctx.mark_non_differentiable(output[1])


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
    return (*gradients, None, None, list(found), *(None for _ in ctx.rest))


native.register_autograd(_differentiate, setup_context=_keep)


class NativeAttention(torch.autograd.Function):
    """``native`` for autograd alone, which costs less than the dispatch of an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE; ``inputs`` are those of ``native``, but with the pairs last."""
        given = (*inputs[:14], inputs[20:], *inputs[14:20])
        output = compute_output(*given)
        _keep(ctx, given, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        given = gradient.resolve_neg()
        *gradients, pairs = _differentiate(ctx, given, compute=compute_gradients)[:15]
        return *gradients, *(None for _ in ctx.rest), *pairs


class NativePart(torch.autograd.Function):
    """``native`` with output and LSE over more keys given: only its backward pass is computed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor, *inputs: Any) -> Tensor:
        """The given output; ``inputs`` are those of ``NativeAttention``."""
        tensors, ctx.rest = inputs[:14], inputs[14:20]
        ctx.save_for_backward(output, lse, *tensors, *inputs[20:])
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *gradients, pairs = _differentiate(ctx, gradient, part=True)[:15]
        return None, None, *gradients, *(None for _ in ctx.rest), *pairs
