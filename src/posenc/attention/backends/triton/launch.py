"""A problem as the arguments of the kernels, and the launch of the forward pass. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.form import FAR, empty_as
from posenc.attention.backends.triton.kernels.arguments import (
    Band,
    Curve,
    Dropout,
    KernelArguments,
    Numbers,
    OffsetTables,
    RotaryArguments,
    Side,
    TableArguments,
    TokenArguments,
)
from posenc.attention.backends.triton.kernels.configs import (
    FP_FUSION,
    KEYS_PER_SPLIT,
    PROGRAMS,
    SPANS,
    tuning_key,
)
from posenc.attention.backends.triton.kernels.forward import (
    combine_kernel,
    forward_kernel,
    split_kernel,
)
from posenc.attention.backends.triton.kernels.gradients import delta_kernel, ends_kernel
from posenc.attention.backends.triton.segments import SUMMARY_BLOCK
from posenc.attention.problem.record import KernelProblem, flatten, paths_of

PRODUCTS_BLOCK = 64

COMBINED = 16
"""Splits that are read at once when they are put together."""

DRAWN = 2**16
"""Steps of the probability of dropout."""

constant = lru_cache(1024, typed=True)(constexpr)
"""A constant of the kernels, made once."""


@dataclass(frozen=True, eq=False)
class Ends:
    """A number per token for the first entry of the tables, and one for the last: ``[B, H, L]``."""

    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: int, heads: int, length: int, *, like: Tensor) -> Ends:
        """Uninitialised numbers, in float32."""
        size = (2, batch, heads, length)
        first, last = like.new_empty(size, dtype=torch.float32).unbind(0)
        return cls(first, last)

    def add_to_rows(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Gradients of rows ``[h, N, F]`` with those at both ends added, of sums a token."""
        wide = vectors.float()
        for entry, sums in ((0, self.first), (rows.shape[1] - 1, self.last)):
            added = (sums.unsqueeze(-2) @ wide).squeeze(-2).sum(0)
            rows[:, entry] += added.sum(0, keepdim=True) if rows.shape[0] == 1 else added
        return rows


class Launch:
    """A problem with the arguments of its kernels.

    Args:
        x: features of each token have to lie together, and tables to be contiguous.
        gradient, output, lse: that of the outputs, and results of the forward pass; None in the
            forward pass. of_lse: the LSE's gradient, if it has one.
    """

    def __init__(
        self,
        x: KernelProblem,
        gradient: Tensor | None = None,
        output: Tensor | None = None,
        lse: Tensor | None = None,
        of_lse: Tensor | None = None,
    ) -> None:
        self.x, self.gradient, self.lse = x, gradient, lse
        self.batch, self.heads, self.queries = x.q.shape[:3]
        self.keys = x.k.shape[2]
        terms, function = x.terms, x.pairs.tensors if x.pairs.kind == "distance" else ()
        rows = (terms.left_rows, terms.right_rows, terms.value_rows)
        tables = [x for x in (terms.bias_by_offset, *rows, *function[:1]) if x is not None]
        self.entries = max((table.shape[1] for table in tables), default=1)
        self.first, self.last = (
            offset - terms.first for offset in (x.geometry.lowest, x.geometry.highest)
        )
        beyond = (self.first < 0, self.last > self.entries - 1)
        self.single = self.entries == 1 and any(beyond)
        # Where there is one entry, all pairs count as beyond the first.
        self.has_first = bool(tables) and (beyond[0] or self.single)
        self.has_last = bool(tables) and beyond[1] and not self.single
        self.ended = self.has_first or self.has_last
        self.span = SPANS[0] if any(x is not None for x in rows) else SPANS[1]
        self.left = self._end_products(terms.left, terms.left_rows)
        self.right = self._end_products(terms.right, terms.right_rows)
        self.second = self._end_products(gradient, terms.value_rows)
        zero = min(max(0, -terms.first), self.entries - 1)
        self.curve = _curve(function, zero) if function else None
        self.sinks = None if x.sinks is None else x.sinks.expand(x.q.shape[:3]).contiguous()
        self.delta = None
        if gradient is not None and output is not None:
            self.delta = _delta(gradient, output)
            if of_lse is not None:
                self.delta -= of_lse

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``."""
        x = self.x
        output = empty_as(x.q, x.v.shape[-1])
        lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
        programs = blocks(self.queries, self.batch * self.heads)
        self.run(forward_kernel, programs, self.arguments(), tokens(output), numbers(lse))
        return output, lse

    def run(
        self,
        kernel: Any,
        programs: Any,
        args: KernelArguments,
        *into: Any,
        kind: Sequence[object] | None = None,
        **constants: int,
    ) -> None:
        """Launch a kernel.

        Args:
            programs: their number, by the tile sizes that are chosen; into: where results go.
            kind: what its tile sizes depend on; None: the problem's, and the side.
            constants: of the launch.
        """
        kind = (*self.kind, args.for_keys.value) if kind is None else kind
        key = tuning_key(*kind, tuned=self.x.tuned)
        kernel[programs](args, *into, key=key, **constants, enable_fp_fusion=FP_FUSION)

    def _end_products(self, vectors: Tensor | None, rows: Tensor | None) -> Ends | None:
        """Products of vectors with the first and last row, where any pair may read them."""
        if not self.ended or vectors is None or rows is None:
            return None
        length = vectors.shape[2]
        ends = Ends.of(self.batch, self.heads, length, like=vectors)
        ends_kernel[(triton.cdiv(length, PRODUCTS_BLOCK) * self.batch * self.heads,)](
            *(tokens(vectors), table(rows), numbers(ends.first), numbers(ends.last)),
            *(rows.shape[1], length, self.heads, PRODUCTS_BLOCK),
            enable_fp_fusion=FP_FUSION,
        )
        return ends

    @cached_property
    def _sides(self) -> tuple[Side, Side]:
        """Queries and keys; ``low`` is the first entry of the tables and ``high`` the last."""
        x, terms, segments, rotary = self.x, self.x.terms, self.x.segments, self.x.rotary
        low, high = low_and_high(self.left)
        value_low, value_high = low_and_high(self.second)
        queries = Side(
            tokens(x.q),
            _rotary(rotary.query_cosine, rotary.query_sine, x),
            maybe(tokens, self.gradient),
            maybe(tokens, terms.left),
            term_low=low,
            term_high=high,
            second_low=value_low,
            second_high=value_high,
            factor=maybe(tokens, terms.query_factor),
            sinks=maybe(numbers, self.sinks),
            lse=maybe(numbers, self.lse),
            delta=maybe(numbers, self.delta),
            **_by_row("segment_ids", segments.query_ids),
            **_by_row("order", segments.query_order),
            **_by_row("summary", segments.query_summary),
            length=self.queries,
        )
        low, high = low_and_high(self.right)
        keys = Side(
            tokens(x.k),
            _rotary(rotary.key_cosine, rotary.key_sine, x),
            tokens(x.v),
            maybe(tokens, terms.right),
            term_low=low,
            term_high=high,
            factor=maybe(tokens, terms.key_factor),
            column=maybe(numbers, terms.column),
            **_by_row("segment_ids", segments.key_ids),
            **_by_row("order", segments.key_order),
            **_by_row("summary", segments.key_summary),
            length=self.keys,
        )
        return queries, keys

    def band(self, *, for_keys: bool) -> Band:
        """The band of visible pairs, with keys as x if ``for_keys``."""
        origin, last = self.x.geometry.shift - self.x.terms.first, self.entries - 1
        window = self.x.segments.window or None
        low = (FAR if self.single else 0) if self.has_first else -FAR
        high = last if self.has_last else FAR
        if for_keys:
            return Band(-origin, -self.last, -self.first, -high, -low, window)
        return Band(origin, self.first, self.last, low, high, window)

    def arguments(self, *, for_keys: bool = False) -> KernelArguments:
        """Arguments of the kernels, with keys as x if ``for_keys``."""
        x, terms, band = self.x, self.x.terms, self.band(for_keys=for_keys)
        sides, rows = self._sides, [maybe(table, terms.left_rows), maybe(table, terms.right_rows)]
        ends = [self.has_first, self.has_last]
        if for_keys:
            rows, ends = rows[::-1], ends[::-1]
            sides = _turned(sides[1]), _turned(sides[0])
        # The first token of the other side may be hidden from any token of this side.
        last = band.origin - (sides[0].length - 1)
        edged = x.segments.query_ids is not None or band.first > last
        bias, dropout = terms.bias_by_offset, None
        if x.dropout:
            threshold = round(x.dropout * DRAWN)
            dropout = Dropout(threshold * DRAWN, DRAWN / max(1, DRAWN - threshold), x.seed)
        exact, of_factors = precision_of(x.q.dtype)
        return KernelArguments(
            x=sides[0],
            y=sides[1],
            tables=OffsetTables(
                bias_by_offset=bias,
                bias_head=0 if bias is None else bias.stride(0),
                x_rows=rows[0],
                y_rows=rows[1],
                value_rows=maybe(table, terms.value_rows),
                curve=self.curve,
                softcap=x.softcap or None,
                count=self.entries,
            ),
            band=band,
            dropout=dropout,
            batch=self.batch,
            heads=self.heads,
            group=self.heads // x.k.shape[1],
            scale=x.scale,
            for_keys=constant(for_keys),
            edged=constant(edged),
            has_low=constant(ends[0]),
            has_high=constant(ends[1]),
            causal=constant(x.segments.causal),
            span=constant(self.span),
            summary_block=constant(SUMMARY_BLOCK),
            precision=constant(exact),
            factor_precision=constant(of_factors),
        )

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Tuning key: the properties that the memory of tiles depends on, and rough sizes."""
        x, segments = self.x, self.x.segments
        flat = flatten(x)
        kind: list[object] = [x.q.dtype, precision_of(x.q.dtype)[0], x.pairs.kind]
        for path, tensor in zip(paths_of(flat.words), flat.tensors, strict=True):
            wide = tensor.dim() == 4 or path.endswith("_rows")
            kind.append(f"{path} {padded(tensor.shape[-1])}" if wide else path)
        kind += [segments.causal, segments.window > 0, x.dropout > 0]
        kind += [x.rotary.adjacent, x.softcap > 0]
        sizes = self.queries, self.keys, self.batch, self.heads
        kind += [size.bit_length() for size in sizes]
        return *kind, self.heads // x.k.shape[1], x.q.device


def attend_single_query(x: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output and LSE; keys are dealt to as many programs as keep the device busy."""
    q, bias, value_rows, cosine = x.q, x.terms.column, x.terms.value_rows, x.rotary.key_cosine
    (batch, heads), (key_heads, keys), width = q.shape[:2], x.k.shape[1:3], x.v.shape[-1]
    bucket = x.pairs.tensors[0] if x.pairs.tensors else None
    # Query heads that read rows of their own cannot share a tile.
    programs = key_heads if value_rows is None or len(value_rows) == 1 else heads
    ratio = heads // programs
    splits = max(1, min(PROGRAMS // (batch * programs), triton.cdiv(keys, KEYS_PER_SPLIT)))
    partial = q.new_empty(batch, heads, splits, width, dtype=torch.float32)
    partial_lse = q.new_empty(batch, heads, splits, dtype=torch.float32)
    launch = Launch(x)
    kind = [q.dtype, q.shape[-1], width, ratio, bias is None, value_rows is None, x.softcap > 0]
    kind += [keys.bit_length(), batch.bit_length(), programs.bit_length(), q.device]
    kind += [] if cosine is None else [cosine.shape[-1], x.rotary.adjacent]
    args = launch.arguments()._replace(batch=None)  # one compilation serves all batch sizes
    launch.run(
        *(split_kernel, (batch * programs * splits,), args),
        *(None if bucket is None else numbers(bucket.unsqueeze(1)), partial, partial_lse, splits),
        kind=kind,
        ratio=ratio,
        rows=padded(ratio),
    )
    output = x.v.new_empty(batch, heads, 1, width)
    lse = q.new_empty(batch, heads, 1, dtype=torch.float32)
    most = triton.next_power_of_2(splits)
    combine_kernel[(batch * heads,)](
        *(partial, partial_lse, output, lse, splits),
        *(most, min(most, COMBINED), width, padded(width)),
        enable_fp_fusion=FP_FUSION,
    )
    return output, lse


def _turned(side: Side) -> Side:
    """A side with the low entry for the high one."""
    if side.term_low is None and side.second_low is None:
        return side
    return side._replace(
        term_low=side.term_high,
        term_high=side.term_low,
        second_low=side.second_high,
        second_high=side.second_low,
    )


def blocks(
    length: int, lanes: int, side: str = "block_x"
) -> Callable[[dict[str, Any]], tuple[int]]:
    """The grid of programs that compute a block of tokens each."""
    return lambda chosen: (triton.cdiv(length, chosen[side]) * lanes,)


def _delta(a: Tensor, b: Tensor) -> Tensor:
    """``a[b, h, l] · b[b, h, l]``, in float32."""
    batch, heads, length = a.shape[:3]
    out = a.new_empty(batch, heads, length, dtype=torch.float32)
    delta_kernel[(triton.cdiv(length, PRODUCTS_BLOCK) * batch * heads,)](
        *(tokens(a), tokens(b), numbers(out), length, heads, PRODUCTS_BLOCK),
        enable_fp_fusion=FP_FUSION,
    )
    return out


def tokens(x: Tensor) -> TokenArguments:
    """A tensor ``[B, H, L, width]``; features have to lie together."""
    width = x.shape[-1]
    row, head, step, _ = x.stride()
    return TokenArguments(x, row, head, step, constant(width), constant(padded(width)))


def numbers(x: Tensor) -> Numbers:
    """A tensor ``[B, H, L]``; tokens have to lie together."""
    return Numbers(x, x.stride(0), x.stride(1))


def table(x: Tensor) -> TableArguments:
    """A contiguous tensor ``[h, N, width]``."""
    width = x.shape[-1]
    head = 0 if x.shape[0] == 1 else x.stride(0)
    return TableArguments(x, head, constant(width), constant(padded(width)))


def _rotary(cosine: Tensor | None, sine: Tensor | None, x: KernelProblem) -> RotaryArguments | None:
    """Factors ``[b, h, L, T]`` for the pairs of features of heads.

    Kernels read sines T numbers after the cosines; the halves of one tensor are.
    """
    if cosine is None or sine is None:
        return None
    count = cosine.shape[-1]
    behind = cosine.data_ptr() + count * cosine.element_size()
    if sine.data_ptr() != behind or sine.stride() != cosine.stride():
        cosine = torch.cat([cosine, sine], dim=-1)
    sizes = zip(cosine.shape[:3], cosine.stride()[:3], strict=True)
    half = (x.q.shape[-1] + 1) // 2
    constants = (count, half, padded(half), x.rotary.adjacent)
    return RotaryArguments(
        cosine, *(0 if size == 1 else stride for size, stride in sizes), *map(constant, constants)
    )


def _curve(tensors: Sequence[Tensor], zero: int) -> Curve:
    """A function of the distance: numbers by entry, knots, slopes, intercepts and rates.

    ``zero``: the entry of offset 0, or the nearest to it.
    """
    values, knots, slope, intercept, rates = tensors
    block = padded(len(knots))
    knots = torch.nn.functional.pad(knots, (0, block - len(knots)), value=float("inf"))
    padded_rates = torch.nn.functional.pad(
        rates, (0, -rates.shape[1] % SUMMARY_BLOCK), mode="replicate"
    )
    summary_blocks = padded_rates.view(len(padded_rates), -1, SUMMARY_BLOCK)
    extremes = torch.stack([summary_blocks.amin(-1), summary_blocks.amax(-1)], dim=1)
    return Curve(
        numbers=values,
        **_by_row("rates", rates),
        **_by_row("extremes", extremes),
        summary_blocks=extremes.shape[2],
        knots=knots,
        slope=slope,
        intercept=intercept,
        zero=zero,
        pieces=constant(slope.shape[1]),
        block=constant(block),
    )


def maybe(form: Callable[[Tensor], Any], x: Tensor | None) -> Any:
    return None if x is None else form(x)


def low_and_high(ends: Ends | None, *, for_keys: bool = False) -> tuple[Any, Any]:
    """Numbers for the low and for the high entry, which is the first if ``for_keys``."""
    if ends is None:
        return None, None
    first, last = numbers(ends.first), numbers(ends.last)
    return (last, first) if for_keys else (first, last)


def _by_row(name: str, x: Tensor | None) -> dict[str, Any]:
    """A tensor ``[b, …]`` with its stride from batch row to batch row, 0 where all agree."""
    if x is None:
        return {}
    return {name: x, f"{name}_row": 0 if x.shape[0] == 1 else x.stride(0)}


def padded(width: int) -> int:
    """The power of two that kernels compute with: 16 or more, which products of matrices need."""
    return max(16, 1 << (width - 1).bit_length())


def precision_of(dtype: torch.dtype) -> tuple[str, str]:
    """Precision of products of this dtype, and of those of float32 factors beside them.

    Three products in TF32 err about as little as one in float32, and take tensor cores.
    """
    if dtype != torch.float32:
        return "ieee", "tf32x3"
    chosen = "tf32" if torch.get_float32_matmul_precision() == "medium" else "tf32x3"
    return chosen, chosen
