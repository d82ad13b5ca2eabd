"""The struct of a call, read from a problem's record: csrc/problem.h; and its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Attend, Result
from posenc.attention.backends.native.build import library
from posenc.attention.backends.native.library import (
    PAD,
    CBucketMap,
    COperand,
    CProblem,
    CRotaryFactors,
    CTokens,
)
from posenc.attention.backends.native.pairs import KINDS
from posenc.attention.problem.record import Geometry, KernelProblem
from posenc.attention.problem.terms import AXES, OF_TOKENS, Spans, Terms, spans_of
from posenc.encoding.prepared import reused

PARTS, ITEMS = 32, 8
"""Sums of gradients over the batch and over blocks of queries at most, so that many threads have
work. They depend on the shape alone: results are the same for any number of threads."""

BLOCK = 256
"""Queries of the smallest block that a thread takes."""


class Arguments:
    """The struct of a call, and all tensors that it points to.

    Attributes:
        struct: what a kernel reads.
        record: the problem.
        dtype: of the kernels: float32 or float64.
        spans: of the buckets, if there are any.
        pairs: tensors of the term outside the structured form, as the kernel reads them.
        splits: blocks of queries whose gradients of keys are summed apart.
    """

    def __init__(self, record: KernelProblem) -> None:
        self.record, self.struct = record, CProblem()
        self.dtype = torch.promote_types(record.q.dtype, torch.float32)
        self.spans: Spans | None = None
        self._kept: list[Tensor] = []
        self._tokens()
        self._geometry(record.geometry)
        self._terms(record.terms)
        if record.rotary.query_cosine is not None:
            self._rotary()
        self.pairs: list[Tensor] = []
        if record.pairs.kind:
            self._pairs()

    def keep(self, x: Tensor) -> Tensor:
        """The tensor, kept for as long as this is."""
        self._kept.append(x)
        return x

    def tokens(self, x: Tensor) -> CTokens:
        """A tensor ``[B, H, L, D]``, copied where its features are apart."""
        x = contiguous_rows(x)
        self._kept.append(x)
        return CTokens.of(x)

    def _tokens(self) -> None:
        x, problem = self.struct, self.record
        (x.batch, x.heads, x.queries, x.dim), (x.groups, x.keys) = (
            problem.q.shape,
            problem.k.shape[1:3],
        )
        x.value_dim, x.scale = problem.v.shape[-1], problem.scale
        x.dropout, x.seed = problem.dropout, 0 if problem.seed is None else int(problem.seed)
        x.softcap = problem.softcap
        if problem.sinks is not None:
            sinks = problem.sinks.double().expand(problem.q.shape[:3])
            x.sinks = self.keep(sinks.contiguous()).data_ptr()
        x.q, x.k, x.v = self.tokens(problem.q), self.tokens(problem.k), self.tokens(problem.v)
        x.chunks = min(x.batch, ceil(PARTS / x.heads))
        blocks = ceil(x.queries / BLOCK)
        threads = ceil(2 * torch.get_num_threads() / (x.heads * x.chunks))
        self.splits = min(ceil(ITEMS / (x.heads * x.chunks)), blocks)
        if problem.pairs.kind == "mixing":  # all heads go together
            self.splits = 1
        x.splits = max(self.splits, min(threads, blocks))

    def _geometry(self, geometry: Geometry) -> None:
        x, intervals = self.struct, geometry.intervals
        if intervals is None:
            band = geometry.shift, geometry.lowest, geometry.highest
            sizes = x.queries, x.keys, *band, geometry.period, geometry.jump
            intervals = reused(lambda: _regular_intervals(*sizes), "regular intervals", *sizes)
        self._kept.append(intervals)
        low, high, base = intervals
        x.low, x.high, x.base = low.data_ptr(), high.data_ptr(), base.data_ptr()
        x.rows_batch = 0 if intervals.shape[1] == 1 else x.queries
        if geometry.bands is not None:
            x.bands = self.keep(geometry.bands).data_ptr()
        x.period, x.jump = geometry.period, geometry.jump

    def _terms(self, terms: Terms) -> None:
        x, operands = self.struct, self.struct.terms
        operands.first = terms.first
        if terms.bucket is not None:
            self.spans = spans = spans_of(terms.bucket, x.period + x.jump or None)
            x.map = CBucketMap(
                self.keep(_padded(spans)).data_ptr() + 4 * PAD,
                spans.span_of.data_ptr(),
                spans.spans.data_ptr(),
                terms.first,
                len(terms.bucket),
                len(spans.buckets),
                *(terms.first + end for end in spans.varying),
            )
        for name, tensor in terms.operands().items():
            value = four_axes(name, self._as_read(name, tensor))
            self._kept.append(value)
            rows, features = value.shape[2:]
            setattr(operands, name, COperand(value=CTokens.of(value), rows=rows, features=features))
            if "N" in AXES[name]:
                x.map.buckets = rows
        # Without tokens of their own, rows are met by the queries and by the keys.
        for rows, tokens, operand in (
            (operands.left_rows, operands.left, x.q),
            (operands.right_rows, operands.right, x.k),
        ):
            if rows.rows and not tokens.rows:
                tokens.value, tokens.features = operand, x.dim

    def _as_read(self, name: str, value: Tensor) -> Tensor:
        """An operand in its dtype, of the buckets that offsets meet, in their order."""
        if name in OF_TOKENS and value.dim() == 4:  # widened as they are read
            return contiguous_rows(value)
        if "N" in AXES[name]:
            rows = value if self.spans is None else self.spans.rows_of(value)
            rows = rows.to(self.dtype)
            side_by_side = rows.stride()[1:] == (rows.shape[2], 1)  # in each head
            return rows if side_by_side else rows.contiguous()
        dtype = torch.float64 if name == "column" else self.dtype  # sums over many tokens
        return value.to(dtype).contiguous()

    def _rotary(self) -> None:
        x, rotary = self.struct, self.record.rotary
        x.adjacent = rotary.adjacent
        factors = (rotary.query_cosine, rotary.query_sine, rotary.key_cosine, rotary.key_sine)
        cosine, sine, key_cosine, key_sine = (
            self.keep(factor.contiguous()) for factor in factors if factor is not None
        )
        x.rotated = cosine.shape[-1]
        x.q_rotary = CRotaryFactors.of(cosine, sine)
        x.k_rotary = CRotaryFactors.of(key_cosine, key_sine)

    def _pairs(self) -> None:
        kind, pairs = self.record.pairs.kind, self.struct.pairs
        for x in self.record.pairs.tensors:
            self.pairs.append(self.keep(x.to(self.dtype).contiguous()))
        pairs.kind = KINDS[kind].number
        for at, size in enumerate(KINDS[kind].sizes(self.pairs)):
            pairs.sizes[at] = size
        for at, tensor in enumerate(self.pairs):
            pairs.data[at] = tensor.data_ptr()


def holds_all(spans: Spans, rows: Tensor) -> bool:
    """True if the buckets that offsets meet are those of all rows, in their order."""
    return spans.consecutive and len(spans.buckets) == rows.shape[1]


def four_axes(name: str, x: Tensor) -> Float[Tensor, "b h rows features"]:
    """An operand with axes for batch, heads, rows and features."""
    x = x if name in OF_TOKENS else x.unsqueeze(0)
    return x if x.dim() == 4 else x.unsqueeze(-1)


def empty_like_tokens(
    like: Float[Tensor, "B H L D"], size: Sequence[int], dtype: torch.dtype | None = None
) -> Float[Tensor, "*parts B H L F"]:
    """Memory in which each token's heads are side by side if those of ``like`` are.

    So that neither outputs nor gradients are copied between attention and a linear map.
    """
    *others, heads, tokens, features = size
    if like.stride(1) < like.stride(2):
        return like.new_empty(*others, tokens, heads, features, dtype=dtype).transpose(-3, -2)
    return like.new_empty(size, dtype=dtype)


def contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _padded(spans: Spans) -> Tensor:
    number = spans.number
    return torch.cat([number[:1].expand(PAD), number, number[-1:].expand(PAD)])


def _regular_intervals(queries: int, keys: int, *numbers: int) -> Tensor:
    """Intervals of a regular grid, or of whole images that see each other (``period`` > 0)."""
    shift, lowest, highest, period, jump = numbers
    i = torch.arange(queries)
    if period:
        columns = period + jump  # offsets along an image row: queries' and keys' columns less one
        width = columns + 1 - period
        base = -(i // width) * columns - i % width + shift
        low, high = torch.zeros_like(i), torch.full_like(i, keys)
    else:
        base = shift - i
        low, high = (lowest - base).clamp(0, keys), (highest + 1 - base).clamp(0, keys)
    return torch.stack([low, high, base]).unsqueeze(1).to(torch.int32)


def empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Memory for output ``[B, H, Q, E]`` and LSE ``[B, H, Q]`` in float64."""
    q, v = record.q, record.v
    lse = q.new_empty(q.shape[:3], dtype=torch.float64)
    return empty_like_tokens(v, (*q.shape[:3], v.shape[3])), lse


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, in float64."""
    call, (out, lse) = Arguments(record), empty_output(record)
    call.struct.out, call.struct.lse = CTokens.of(out), lse.data_ptr()
    library().call("forward", call.struct, call.dtype)
    return out, lse


def prepare(record: KernelProblem) -> Attend | None:
    """Attention of other tokens than the record's; None if it would have to copy or transform them.

    Factors and columns of the record have to be the same for all tokens.
    """
    if record.terms.left is not None or record.terms.right is not None:
        return None
    if any(contiguous_rows(x) is not x for x in (record.q, record.k, record.v)):
        return None
    call, kernels, (out, _) = Arguments(record), library(), empty_output(record)
    call.struct.out, shape, strides = CTokens.of(out), out.shape, out.stride()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result:
        struct = CProblem.from_buffer_copy(call.struct)  # threads may call at the same time
        out = v.new_empty_strided(shape, strides)
        lse = q.new_empty(shape[:3], dtype=torch.float64)
        struct.q.data, struct.k.data, struct.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        for rows, tokens, operand in (
            (struct.terms.left_rows, struct.terms.left, struct.q),
            (struct.terms.right_rows, struct.terms.right, struct.k),
        ):
            if rows.rows:
                tokens.value.data = operand.data
        struct.out.data, struct.lse = out.data_ptr(), lse.data_ptr()
        kernels.call("forward", struct, call.dtype)
        return Result(out, lse)

    return attend
