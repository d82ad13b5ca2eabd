"""Launches of the kernels: one in the forward pass, up to five in the backward. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.form import FAR
from posenc.attention.backends.triton.forms import (
    Ends,
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
from posenc.attention.backends.triton.kernels.configs import FP_FUSION, SPANS, tuning_key
from posenc.attention.backends.triton.kernels.forward import forward_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel
from posenc.attention.backends.triton.kernels.products import delta_kernel, ends_kernel
from posenc.attention.backends.triton.posing import RATES, SUMMARY_BLOCK, empty_as
from posenc.attention.problem.record import SCHEMA, KernelProblem, flatten, paths_of

PRODUCTS_BLOCK = 64

DRAWN = 2**16
"""Steps of the probability of dropout."""

END = constexpr(True)


class Launch:
    """A problem with the launches of its forward and backward kernels.

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
        tables = [*terms.by_offset, *function[:1]]
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
        rows = (terms.left_rows, terms.right_rows, terms.value_rows)
        self.span = SPANS[0] if any(x is not None for x in rows) else SPANS[1]
        self.left = self._ends(terms.left, terms.left_rows)
        self.right = self._ends(terms.right, terms.right_rows)
        self.second = self._ends(gradient, terms.value_rows)
        zero = min(max(0, -terms.first), self.entries - 1)
        self.curve = curve(function, zero) if function else None
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
        forward_kernel[blocks(self.queries, self.batch * self.heads)](
            **self.common(for_keys=False),
            output=tokens(output),
            lse=numbers(lse),
            edged=self._edged(for_keys=False),
            enable_fp_fusion=FP_FUSION,
        )
        return output, lse

    def tokens(self, *, for_keys: bool) -> tuple[dict[str, Tensor], Ends | None, Ends | None]:
        """Gradients of queries and their terms; or of keys, values and keys' terms if ``for_keys``.

        By their paths, with the sums of the gradients of logits, and of weights, over the pairs at
        both ends.
        """
        x, terms = self.x, self.x.terms
        names = ("k", "right", "key_factor") if for_keys else ("q", "left", "query_factor")
        main = x.k if for_keys else x.q
        length = self.keys if for_keys else self.queries
        into = empty_as(main, main.shape[-1])
        second = empty_as(x.v, x.v.shape[-1]) if for_keys else None
        term, factor = (
            None if operand is None else empty_as(operand, operand.shape[-1])
            for operand in (getattr(terms, name) for name in names[1:])
        )
        column = terms.column if for_keys else None
        column = None if column is None else column.new_empty(column.shape)
        rates = None
        if self.curve is not None and not for_keys:
            rates = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
        sums = weights = None
        if self.ended:
            sums = Ends.of(self.batch, self.heads, length, like=x.q)
            if terms.value_rows is not None and not for_keys:
                weights = Ends.of(self.batch, self.heads, length, like=x.q)
        forms = arguments.Gradients(
            tokens(into),
            maybe(tokens, second),
            maybe(tokens, term),
            maybe(tokens, factor),
            maybe(numbers, column),
            *low_and_high(sums, for_keys=for_keys),
            *low_and_high(weights, for_keys=for_keys),
            maybe(numbers, rates),
        )
        gradients_kernel[blocks(length, into.shape[0] * into.shape[1])](
            **self.common(for_keys=for_keys),
            into=forms,
            for_keys=for_keys,
            edged=self._edged(for_keys=for_keys),
            span=self.span,
            enable_fp_fusion=FP_FUSION,
        )
        if rates is not None:
            rates = rates.sum(1).sum_to_size(x.pairs.tensors[-1].shape)
        gradients = {
            names[0]: into,
            "v": second,
            f"terms.{names[1]}": term,
            f"terms.{names[2]}": factor,
            "terms.column": column,
            RATES: rates,
        }
        return {path: x for path, x in gradients.items() if x is not None}, sums, weights

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
            enable_fp_fusion=FP_FUSION,
        )
        return ends

    def _sides(self, *, for_keys: bool) -> tuple[arguments.Side, arguments.Side]:
        queries, keys = self._both_sides
        if self.ended:
            left, right, second = (
                low_and_high(ends, for_keys=for_keys)
                for ends in (self.left, self.right, self.second)
            )
            queries = queries._replace(
                term_low=left[0], term_high=left[1], second_low=second[0], second_high=second[1]
            )
            keys = keys._replace(term_low=right[0], term_high=right[1])
        return (keys, queries) if for_keys else (queries, keys)

    @cached_property
    def _both_sides(self) -> tuple[arguments.Side, arguments.Side]:
        """Queries and keys, without products with the rows at both ends."""
        x, terms, segments, rotation = self.x, self.x.terms, self.x.segments, self.x.rotary
        queries = arguments.Side(
            tokens(x.q),
            rotary(
                rotation.query_cosine,
                rotation.query_sine,
                x.q.shape[-1],
                adjacent=rotation.adjacent,
            ),
            maybe(tokens, self.gradient),
            maybe(tokens, terms.left),
            *(None, None, None, None),
            maybe(tokens, terms.query_factor),
            None,
            maybe(numbers, self.sinks),
            maybe(numbers, self.lse),
            maybe(numbers, self.delta),
            *by_row(segments.query_ids),
            *by_row(segments.query_order),
            *by_row(segments.query_summary),
            self.queries,
            END,
        )
        keys = arguments.Side(
            tokens(x.k),
            rotary(
                rotation.key_cosine, rotation.key_sine, x.k.shape[-1], adjacent=rotation.adjacent
            ),
            tokens(x.v),
            maybe(tokens, terms.right),
            *(None, None, None, None),
            maybe(tokens, terms.key_factor),
            maybe(numbers, terms.column),
            *(None, None, None),
            *by_row(segments.key_ids),
            *by_row(segments.key_order),
            *by_row(segments.key_summary),
            self.keys,
            END,
        )
        return queries, keys

    def band(self, *, for_keys: bool) -> arguments.Band:
        """The band of visible pairs, with keys as x if ``for_keys``."""
        origin, last = self.x.geometry.shift - self.x.terms.first, self.entries - 1
        window = self.x.segments.window or None
        low = (FAR if self.single else 0) if self.has_first else -FAR
        high = last if self.has_last else FAR
        if for_keys:
            return arguments.Band(-origin, -self.last, -self.first, -high, -low, window)
        return arguments.Band(origin, self.first, self.last, low, high, window)

    def _edged(self, *, for_keys: bool) -> bool:
        """True if the first token of the other side may be hidden from any token of this side."""
        if self.x.segments.query_ids is not None:
            return True
        band = self.band(for_keys=for_keys)
        return bool(band.first > band.origin - ((self.keys if for_keys else self.queries) - 1))

    def common(self, *, for_keys: bool, sums: str = "") -> dict[str, Any]:
        """Arguments of the large kernels; ``sums`` names the gradients summed by offset."""
        x, terms = self.x, self.x.terms
        x_side, y_side = self._sides(for_keys=for_keys)
        band = self.band(for_keys=for_keys)
        exact, of_factors = precision_of(x.q.dtype)
        left, right = maybe(table, terms.left_rows), maybe(table, terms.right_rows)
        bias = terms.bias_by_offset
        tables = arguments.OffsetTables(
            bias,
            0 if bias is None else bias.stride(0),
            *((right, left) if for_keys else (left, right)),
            maybe(table, terms.value_rows),
            self.curve,
            x.softcap or None,
            self.entries,
            END,
        )
        dropout = None
        if x.dropout:
            threshold = round(x.dropout * DRAWN)
            factor = DRAWN / max(1, DRAWN - threshold)
            dropout = arguments.Dropout(threshold * DRAWN, factor, x.seed)
        return {
            "x": x_side,
            "y": y_side,
            "tables": tables,
            "band": band,
            "sizes": arguments.Sizes(self.batch, self.heads, self.heads // x.k.shape[1]),
            "dropout": dropout,
            "scale": x.scale,
            "key": tuning_key(*self._kind, sums, tuned=x.tuned),
            "has_low": self.has_last if for_keys else self.has_first,
            "has_high": self.has_first if for_keys else self.has_last,
            "causal": x.segments.causal,
            "summary_block": SUMMARY_BLOCK,
            "precision": exact,
            "factor_precision": of_factors,
        }

    @cached_property
    def _kind(self) -> tuple[object, ...]:
        """Tuning key: the properties that the memory of tiles depends on, and rough sizes."""
        x, segments = self.x, self.x.segments
        flat = flatten(x, SCHEMA)
        kind: list[object] = [x.q.dtype, precision_of(x.q.dtype)[0], x.pairs.kind]
        for path, tensor in zip(paths_of(flat.words), flat.tensors, strict=True):
            wide = tensor.dim() == 4 or path.endswith("_rows")
            kind.append(f"{path} {padded(tensor.shape[-1])}" if wide else path)
        kind += [segments.causal, segments.window > 0, x.dropout > 0]
        kind += [x.rotary.adjacent, x.softcap > 0]
        sizes = self.queries, self.keys, self.batch, self.heads
        kind += [size.bit_length() for size in sizes]
        return *kind, self.heads // x.k.shape[1], x.q.device


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
        tokens(a),
        tokens(b),
        numbers(out),
        length,
        heads,
        PRODUCTS_BLOCK,
        enable_fp_fusion=FP_FUSION,
    )
    return out
