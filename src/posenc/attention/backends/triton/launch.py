"""From tensors to launches: forward in one kernel, backward in up to five. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.band import FAR
from posenc.attention.backends.triton.forms import (
    by_row,
    curve,
    low_and_high,
    maybe,
    numbers,
    padded,
    precision_of,
    rotary,
    table,
    tokens,
)
from posenc.attention.backends.triton.kernels import arguments
from posenc.attention.backends.triton.kernels.configs import SPANS, UNTUNED
from posenc.attention.backends.triton.kernels.forward import forward_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel
from posenc.attention.backends.triton.kernels.products import delta_kernel, ends_kernel
from posenc.attention.backends.triton.operands import TENSORS, Ends, Operands, Options, empty_as
from posenc.attention.backends.triton.segments import GRANULE

__all__ = ["Call", "blocks"]

PRODUCTS_BLOCK = 64

DRAWN = 2**16
"""Steps of the probability of dropout."""

END = constexpr(True)


class Call:
    """One problem, ready to be launched in either direction.

    Args:
        x: operands. Features of each token have to lie together, and tables to be contiguous.
        options: its numbers.
        gradient, output, lse: that of the outputs, and results of the forward pass; None in the
            forward pass.
    """

    def __init__(
        self,
        x: Operands,
        options: Options,
        *,
        gradient: Tensor | None = None,
        output: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        self.x, self.options, self.gradient, self.lse = x, options, gradient, lse
        self.batch, self.heads, self.queries = x.q.shape[:3]
        self.keys = x.k.shape[2]
        beyond = (options.first < 0, options.last > x.entries - 1)
        self.single = x.entries == 1 and any(beyond)
        # Where there is one entry, all pairs count as beyond the first.
        self.has_first = x.reads_offsets and (beyond[0] or self.single)
        self.has_last = x.reads_offsets and beyond[1] and not self.single
        self.ended = self.has_first or self.has_last
        unrolled = any(rows is not None for rows in (x.left_rows, x.right_rows, x.value_rows))
        self.span = SPANS[0] if unrolled else SPANS[1]
        self.left, self.right = self._ends(x.left, x.left_rows), self._ends(x.right, x.right_rows)
        self.second = self._ends(gradient, x.value_rows)
        self.curve = curve(x, options.zero)
        self.delta = None
        if gradient is not None and output is not None:
            self.delta = _delta(gradient, output)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``."""
        x = self.x
        output = empty_as(x.q, x.v.shape[-1])
        lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
        forward_kernel[blocks(self.queries, self.batch * self.heads)](
            **self.common(flip=False),
            output=tokens(output),
            lse=numbers(lse),
            edged=self._edged(flip=False),
        )
        return output, lse

    def tokens(self, *, flip: bool) -> tuple[Operands, Ends | None, Ends | None]:
        """dQ and gradients of the queries' terms; or dK, dV and the keys' terms' if ``flip``.

        With the sums of the gradients of logits, and of weights, over the pairs at both ends.
        """
        x = self.x
        main, term, factor = (x.k, x.right, x.key_factor) if flip else (x.q, x.left, x.query_factor)
        length = self.keys if flip else self.queries
        into = empty_as(main, main.shape[-1])
        second = empty_as(x.v, x.v.shape[-1]) if flip else None
        term, factor = (
            None if each is None else empty_as(each, each.shape[-1]) for each in (term, factor)
        )
        column = x.column.new_empty(x.column.shape) if flip and x.column is not None else None
        rates = None
        if x.curve_rates is not None and not flip:
            rates = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
        sums = weights = None
        if self.ended:
            sums = Ends.of(self.batch, self.heads, length, like=x.q)
            if x.value_rows is not None and not flip:
                weights = Ends.of(self.batch, self.heads, length, like=x.q)
        forms = arguments.Gradients(
            tokens(into),
            maybe(tokens, second),
            maybe(tokens, term),
            maybe(tokens, factor),
            maybe(numbers, column),
            *low_and_high(sums, flip=flip),
            *low_and_high(weights, flip=flip),
            maybe(numbers, rates),
        )
        gradients_kernel[blocks(length, into.shape[0] * into.shape[1])](
            **self.common(flip=flip),
            into=forms,
            for_keys=flip,
            edged=self._edged(flip=flip),
            span=self.span,
        )
        if second is not None:
            found = Operands(x.q, into, second, right=term, column=column, key_factor=factor)
        else:
            if rates is not None and x.curve_rates is not None:
                rates = rates.sum(1).sum_to_size(x.curve_rates.shape)
            found = Operands(into, x.k, x.v, left=term, query_factor=factor, curve_rates=rates)
        return found, sums, weights

    def _ends(self, vectors: Tensor | None, rows: Tensor | None) -> Ends | None:
        """Products of vectors with the first and last row, where any pair may read them."""
        if not self.ended or vectors is None or rows is None:
            return None
        length = vectors.shape[2]
        ends = Ends.of(self.batch, self.heads, length, like=vectors)
        ends_kernel[(triton.cdiv(length, PRODUCTS_BLOCK) * self.batch * self.heads,)](
            tokens(vectors),
            table(rows),
            numbers(ends.first),
            numbers(ends.last),
            rows.shape[1],
            length,
            self.heads,
            PRODUCTS_BLOCK,
        )
        return ends

    def _sides(self, *, flip: bool) -> tuple[arguments.Side, arguments.Side]:
        x, adjacent = self.x, self.options.adjacent
        queries = arguments.Side(
            tokens(x.q),
            rotary(x.query_rotary, x.q.shape[-1], adjacent=adjacent),
            maybe(tokens, self.gradient),
            maybe(tokens, x.left),
            *low_and_high(self.left, flip=flip),
            *low_and_high(self.second, flip=flip),
            maybe(tokens, x.query_factor),
            None,
            maybe(numbers, self.lse),
            maybe(numbers, self.delta),
            *by_row(x.query_segment_ids),
            *by_row(x.query_order),
            *by_row(x.query_summary),
            self.queries,
            END,
        )
        keys = arguments.Side(
            tokens(x.k),
            rotary(x.key_rotary, x.k.shape[-1], adjacent=adjacent),
            tokens(x.v),
            maybe(tokens, x.right),
            *low_and_high(self.right, flip=flip),
            None,
            None,
            maybe(tokens, x.key_factor),
            maybe(numbers, x.column),
            None,
            None,
            *by_row(x.key_segment_ids),
            *by_row(x.key_order),
            *by_row(x.key_summary),
            self.keys,
            END,
        )
        return (keys, queries) if flip else (queries, keys)

    def band(self, *, flip: bool) -> arguments.Band:
        """The band of pairs, the keys' if ``flip``."""
        options, last = self.options, self.x.entries - 1
        low = (FAR if self.single else 0) if self.has_first else -FAR
        high = last if self.has_last else FAR
        if flip:
            return arguments.Band(
                -options.origin, -options.last, -options.first, -high, -low, options.window
            )
        return arguments.Band(
            options.origin, options.first, options.last, low, high, options.window
        )

    def _edged(self, *, flip: bool) -> bool:
        """True if the first token of the other side may be hidden from any of the own tokens."""
        if self.x.query_segment_ids is not None:
            return True
        band = self.band(flip=flip)
        return bool(band.first > band.origin - ((self.keys if flip else self.queries) - 1))

    def common(self, *, flip: bool) -> dict[str, Any]:
        """Arguments of the large kernels."""
        x, options = self.x, self.options
        own, others = self._sides(flip=flip)
        band = self.band(flip=flip)
        exact, of_factors = precision_of(x.q.dtype)
        left, right = maybe(table, x.left_rows), maybe(table, x.right_rows)
        tables = arguments.Tables(
            x.bias_by_offset,
            0 if x.bias_by_offset is None else x.bias_by_offset.stride(0),
            *((right, left) if flip else (left, right)),
            maybe(table, x.value_rows),
            self.curve,
            x.entries,
            END,
        )
        dropout = None
        if options.dropout:
            threshold = round(options.dropout * DRAWN)
            factor = DRAWN / max(1, DRAWN - threshold)
            dropout = arguments.Dropout(threshold * DRAWN, factor, x.seed)
        return {
            "x": own,
            "y": others,
            "tables": tables,
            "band": band,
            "sizes": arguments.Sizes(self.batch, self.heads, self.heads // x.k.shape[1]),
            "dropout": dropout,
            "scale": options.scale,
            "key": self._key(exact),
            "has_low": self.has_last if flip else self.has_first,
            "has_high": self.has_first if flip else self.has_last,
            "causal": options.causal,
            "granule": GRANULE,
            "precision": exact,
            "factor_precision": of_factors,
        }

    def _key(self, precision: str) -> str:
        """Key of the autotuner: all that the memory of tiles depends on, and rough sizes."""
        found = [] if self.options.tuned else [UNTUNED]
        found += [str(self.x.q.dtype), precision]
        for name in TENSORS:
            x: Tensor | None = getattr(self.x, name)
            if x is not None:
                wide = x.dim() == 4 or name.endswith("_rows")
                found.append(f"{name} {padded(x.shape[-1])}" if wide else name)
        options = self.options
        kind = options.causal, options.window is not None, options.dropout > 0, options.adjacent
        sizes = self.queries, self.keys, self.batch, self.heads
        found += [str(size.bit_length()) for size in sizes]
        group = self.heads // self.x.k.shape[1]
        return " ".join([*found, *map(str, kind), str(group), str(self.x.q.device)])


def blocks(
    length: int, lanes: int, side: str = "block_x"
) -> Callable[[dict[str, Any]], tuple[int]]:
    """The grid of programs that own a block of tokens each."""
    return lambda chosen: (triton.cdiv(length, chosen[side]) * lanes,)


def _delta(a: Tensor, b: Tensor) -> Tensor:
    """``a[b, h, l] · b[b, h, l]``, in float32."""
    batch, heads, length = a.shape[:3]
    out = a.new_empty(batch, heads, length, dtype=torch.float32)
    delta_kernel[(triton.cdiv(length, PRODUCTS_BLOCK) * batch * heads,)](
        tokens(a), tokens(b), numbers(out), length, heads, PRODUCTS_BLOCK
    )
    return out
