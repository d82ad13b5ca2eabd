"""From tensors to launches: forward in one kernel, backward in up to five. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.band import FAR
from posenc.attention.backends.triton.form import shared_memory, tile_memory
from posenc.attention.backends.triton.forms import (
    by_row,
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
from posenc.attention.backends.triton.kernels.configs import (
    PROGRAMS,
    SPANS,
    UNTUNED,
    diagonal_block,
    room,
)
from posenc.attention.backends.triton.kernels.forward import forward_kernel
from posenc.attention.backends.triton.kernels.gradients import gradients_kernel
from posenc.attention.backends.triton.kernels.offsets import offsets_kernel
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
        )
        gradients_kernel[blocks(length, into.shape[0] * into.shape[1])](
            **self.common(flip=flip),
            into=forms,
            flip=flip,
            edged=self._edged(flip=flip),
            span=self.span,
        )
        if second is not None:
            found = Operands(x.q, into, second, right=term, column=column, key_factor=factor)
        else:
            found = Operands(into, x.k, x.v, left=term, query_factor=factor)
        return found, sums, weights

    def offsets(
        self, rows: str | None, *, bias_wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the offset bias ``[H, N]`` and of one table, without the sums at its ends.

        Args:
            rows: ``"left_rows"``, ``"right_rows"`` or ``"value_rows"``; None: none.
            bias_wanted: whether that of the offset bias is wanted.
        """
        x = self.x
        given: Tensor | None = None if rows is None else getattr(x, rows)
        flip = rows in ("left_rows", "value_rows")
        width, itemsize, tables = self._room()
        shared = shared_memory(x.q.device)
        block = diagonal_block(
            room(width, itemsize, tables),
            lambda side: tile_memory(side, width, itemsize, tables) <= shared,
        )
        band = self._band(flip=flip)
        low_steps, high_steps = self._steps(band)
        first, count = self._diagonals(band, flip=flip, block=block)
        shared = given is not None and given.shape[0] == 1
        heads = 1 if shared and not bias_wanted else self.heads
        splits = max(1, min(PROGRAMS // max(1, count * heads), 64))
        size = (splits, heads, count, 2 * block)
        bias_sum = x.q.new_empty(size, dtype=torch.float32) if bias_wanted else None
        row_sum = None
        if given is not None:
            row_sum = x.q.new_empty(*size, given.shape[-1], dtype=torch.float32)
        if count:
            common = self.common(flip=flip)
            common["key"] += f" {rows} {bias_wanted}"
            offsets_kernel[(count * heads * splits,)](
                **common,
                bias_ptr=bias_sum,
                rows_ptr=row_sum,
                first_diagonal=first,
                diagonals=count,
                low_steps=low_steps,
                high_steps=high_steps,
                span=self.span,
                heads_apart=heads,
                splits=splits,
                width=0 if given is None else given.shape[-1],
                of_values=rows == "value_rows",
                flip=flip,
                block=block,
            )
        middle = first * block + int(band.origin)
        start = -(middle + count * block - 1) if flip else middle - (block - 1)
        found = None if row_sum is None else _joined(row_sum, start, x.entries, reverse=flip)
        if found is not None and shared:
            found = found.sum(0, keepdim=True)
        return (
            None if bias_sum is None else _joined(bias_sum, start, x.entries, reverse=flip),
            found,
        )

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

    def _band(self, *, flip: bool) -> arguments.Band:
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
        band = self._band(flip=flip)
        return bool(band.first > band.origin - ((self.keys if flip else self.queries) - 1))

    def _steps(self, band: arguments.Band) -> tuple[int, int]:
        """Squares at most, and at least, so many steps apart read one entry alone."""
        margin = self.span - 1
        low = (band.low - band.origin - margin) // self.span
        return low, -((band.origin - band.high - margin) // self.span)

    def _diagonals(self, band: arguments.Band, *, flip: bool, block: int) -> tuple[int, int]:
        """The first diagonal of tiles with visible pairs between the ends, and how many."""
        x_length, y_length = (self.keys, self.queries) if flip else (self.queries, self.keys)
        low, high = self._steps(band)
        least = -((band.origin + block - 1 - band.first) // block)
        most = (band.last - band.origin + block - 1) // block
        ratio = self.span // block
        least = max(least, low * ratio + 1, 1 - triton.cdiv(x_length, block))
        most = min(most, high * ratio - 1, triton.cdiv(y_length, block) - 1)
        return least, max(0, most - least + 1)

    def common(self, *, flip: bool) -> dict[str, Any]:
        """Arguments of the large kernels."""
        x, options = self.x, self.options
        own, others = self._sides(flip=flip)
        band = self._band(flip=flip)
        exact, of_factors = precision_of(x.q.dtype)
        left, right = maybe(table, x.left_rows), maybe(table, x.right_rows)
        tables = arguments.Tables(
            x.bias_by_offset,
            0 if x.bias_by_offset is None else x.bias_by_offset.stride(0),
            *((right, left) if flip else (left, right)),
            maybe(table, x.value_rows),
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

    def _room(self) -> tuple[int, int, int]:
        """Width and size of the numbers of vectors, and how many tables are unrolled."""
        x = self.x
        tables = (x.left_rows, x.right_rows, x.value_rows)
        vectors = [x.q, x.v, *(each for each in tables if each is not None)]
        width = max(padded(each.shape[-1]) for each in vectors)
        return width, x.q.element_size(), len(vectors) - 2

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


def _joined(sums: Tensor, start: int, entries: int, *, reverse: bool) -> Tensor:
    """Windows ``[splits, h, n, 2 · block, …]`` at steps of a block, added up to ``[h, N, …]``.

    Args:
        start: entry at which the first window begins (the last, where ``reverse``). What is before
            the first entry and beyond the last is theirs.
    """
    windows = sums.sum(0)
    if reverse:
        windows = windows.flip(1)
    heads, count, span = windows.shape[:3]
    rest = windows.shape[3:]
    block = span // 2
    whole = windows.new_zeros(heads, (count + 1) * block, *rest)
    whole[:, : count * block] += windows[:, :, :block].flatten(1, 2)
    whole[:, block:] += windows[:, :, block:].flatten(1, 2)
    found = windows.new_zeros(heads, entries, *rest)
    low, high = (min(max(entry - start, 0), whole.shape[1]) for entry in (0, entries))
    found[:, start + low : start + high] = whole[:, low:high]
    found[:, 0] += whole[:, :low].sum(1)
    found[:, -1] += whole[:, high:].sum(1)
    return found
