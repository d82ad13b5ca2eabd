"""Structured terms over a regular grid, a block of queries at a time, with a backward of its own.

Terms are read by offset. A block of Q queries and K keys meets W = Q + K - 1
offsets; what depends on a token and an offset is one product ``[Q, W]``, of which row i holds the
block's logits from column Q - 1 - i on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.problem.dropout import KeyedDropout
from posenc.attention.problem.flat import by_path, flatten
from posenc.attention.problem.record import SCHEMA, KernelProblem

ROWS = 128
"""Queries of a block."""

BUDGET = {"cpu": 2**19}
"""Logits of a block by device, so that the few tensors of them stay in a core's cache."""

MANY = 2**24
"""The same on accelerators."""


@dataclass(frozen=True, eq=False)
class Operands:
    """Tensors of a problem, all of one dtype, or their gradients.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, H, K, D]``; v: ``[B, H, K, E]``.
        bias_by_offset, left, left_rows, right, right_rows, column, value_rows: as of ``Terms``,
            read at all Q + K - 1 offsets.
        sinks: ``[B|1, H, Q|1]``.
        output, lse: over more keys than these, ``[B, H, Q, E]`` and ``[B, H, Q]``.
        of_lse: gradient of the LSE.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B H K D"]
    v: Float[Tensor, "B H K E"]
    bias_by_offset: Float[Tensor, "H W"] | None = None
    left: Float[Tensor, "B H Q F"] | None = None
    left_rows: Float[Tensor, "h W F"] | None = None
    right: Float[Tensor, "B H K F"] | None = None
    right_rows: Float[Tensor, "h W F"] | None = None
    column: Float[Tensor, "b H K"] | None = None
    value_rows: Float[Tensor, "h W E"] | None = None
    sinks: Float[Tensor, "b H q"] | None = None
    output: Float[Tensor, "B H Q E"] | None = None
    lse: Float[Tensor, "B H Q"] | None = None
    of_lse: Float[Tensor, "B H Q"] | None = None

    @classmethod
    def of(cls, record: KernelProblem, given: Sequence[Tensor]) -> Operands:
        """Those of a record, with output, LSE and the LSE's gradient if they are given."""
        terms = {name: getattr(record.terms, name) for name in TERMS}
        terms |= zip(("output", "lse", "of_lse"), given, strict=False)
        return cls(record.q, record.k, record.v, sinks=record.sinks, **terms)

    def part(self, batch: int, heads: slice) -> Operands:
        """Views of some heads of a batch row; a dimension that is shared stays."""

        def cut(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            if name in BATCHED:
                x = x[batch : batch + 1] if len(x) > 1 else x
                return x[:, heads]
            return x[heads] if len(x) > 1 else x

        return Operands(**{x.name: cut(x.name, getattr(self, x.name)) for x in fields(self)})  # type: ignore[arg-type]


TERMS = ("bias_by_offset", "left", "left_rows", "right", "right_rows", "column", "value_rows")

BATCHED = {"q", "k", "v", "left", "right", "column", "sinks", "output", "lse", "of_lse"}


@dataclass(frozen=True)
class Band:
    """A regular grid's offsets ``shift + j - i``, and those that it shows: first to last."""

    shift: int
    first: int
    last: int

    def keys(self, begin: int, end: int, count: int) -> slice:
        """Keys that some of the queries see; a single one where there is none."""
        low = min(max(0, begin + self.first - self.shift), count - 1)
        return slice(low, max(low + 1, min(count, end + self.last - self.shift)))

    def hidden(self, rows: slice, keys: slice, device: torch.device) -> Bool[Tensor, "Q K"] | None:
        """True where a pair is masked; None if none is."""
        lowest, highest = self.shift + keys.start - rows.stop + 1, self.shift + keys.stop - 1
        if self.first <= lowest and highest - rows.start <= self.last:
            return None
        key = torch.arange(self.shift + keys.start, self.shift + keys.stop, device=device)
        offset = key - torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1)
        return (offset < self.first) | (offset > self.last)


def skew(x: Float[Tensor, "*dims Q W"], keys: int) -> Float[Tensor, "*dims Q K"]:
    """Element (i, j) is ``x[i, j - i + Q - 1]``; a view of a contiguous ``x``."""
    queries, width = x.shape[-2:]
    if queries == 1:
        return x
    rows = x.flatten(-2)[..., queries - 1 : queries * width - 1]
    return rows.view(*x.shape[:-2], queries, width - 1)[..., :keys]


def unskew(x: Float[Tensor, "*dims Q K"]) -> Float[Tensor, "*dims Q W"]:
    """The tensor of which ``x`` is the skew, with zeros elsewhere."""
    queries, keys = x.shape[-2:]
    wide = x.new_zeros(*x.shape[:-1], queries + keys - 1)
    skew(wide, keys).copy_(x)
    return wide


@dataclass(frozen=True, eq=False)
class Block:
    """Queries ``rows`` of some heads of a batch row, and the ``keys`` that they may see.

    Args:
        x: the operands of the heads.
        hidden: True where a pair is masked; None if none is.
        dropout: of these pairs; None for none.
    """

    x: Operands
    rows: slice
    keys: slice
    scale: float
    softcap: float
    hidden: Bool[Tensor, "Q K"] | None
    dropout: KeyedDropout | None

    @property
    def offsets(self) -> slice:
        """Indices of the offsets between the rows and the keys."""
        first = self.keys.start - self.rows.stop + self.x.q.shape[2]
        return slice(first, first + self._width(self.keys))

    def logits(self) -> tuple[Float[Tensor, "1 h Q K"], Tensor | None]:
        """Logits, -inf where masked, and the tangent that a cap multiplies them with."""
        x, keys = self.x, self.keys
        logits = x.q[:, :, self.rows] @ x.k[:, :, keys].mT * self.scale
        by_offset = None if x.bias_by_offset is None else x.bias_by_offset[:, None, self.offsets]
        if x.left is not None and x.left_rows is not None:
            products = x.left[:, :, self.rows] @ x.left_rows[:, self.offsets].mT
            by_offset = products if by_offset is None else products.add_(by_offset)
        if by_offset is not None:
            by_offset = by_offset.expand(*by_offset.shape[:-2], logits.shape[2], -1)
            logits += skew(by_offset, logits.shape[3])
        if x.right is not None and x.right_rows is not None:
            for tile, offsets in self._tiles():
                products = x.right[:, :, tile] @ x.right_rows[:, offsets].flip(1).mT
                here = slice(tile.start - keys.start, tile.stop - keys.start)
                logits[..., here] += skew(products, logits.shape[2]).mT
        if x.column is not None:
            logits += x.column[:, :, None, keys]
        tangent = None
        if self.softcap:
            tangent = logits.div_(self.softcap).tanh_()
            logits = tangent * self.softcap
        if self.hidden is not None:
            logits.masked_fill_(self.hidden, -torch.inf)
        return logits, tangent

    def attend(self) -> tuple[Float[Tensor, "1 h Q E"], Float[Tensor, "1 h Q"]]:
        """Output and LSE."""
        x, (weights, _) = self.x, self.logits()
        row_max = weights.amax(-1, keepdim=True)
        sinks = self._own(x.sinks)
        if sinks is not None:
            row_max = row_max.maximum(sinks)
        row_max = row_max.clamp(min=torch.finfo(weights.dtype).min)  # of rows that see nothing
        total = weights.sub_(row_max).exp_().sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - row_max).exp()
        lse = (total.log() + row_max).squeeze(-1)
        if self.dropout is not None:
            weights *= self.dropout.factors(weights)
        output = weights @ x.v[:, :, self.keys]
        if x.value_rows is not None:
            output += unskew(weights) @ x.value_rows[:, self.offsets]
        return output / total.masked_fill(total == 0, 1.0), lse

    def differentiate(self, into: Operands, gradient: Float[Tensor, "1 h Q E"]) -> None:
        """Add the gradients through this block to those of the same heads that are wanted."""
        x, rows, keys, at = self.x, self.rows, self.keys, self.offsets
        sinks, d_sinks = self._own(x.sinks), self._own(into.sinks)
        assert x.output is not None
        assert x.lse is not None
        lse = x.lse[:, :, rows, None]
        delta = (gradient * x.output[:, :, rows]).sum(-1, keepdim=True)
        if x.of_lse is not None:
            delta = delta - x.of_lse[:, :, rows, None]
        logits, tangent = self.logits()
        weights = logits.sub_(lse.masked_fill(lse.isneginf(), torch.inf)).exp_()
        dweights = gradient @ x.v[:, :, keys].mT
        if x.value_rows is not None:
            dweights += skew(gradient @ x.value_rows[:, at].mT, dweights.shape[3])
        kept = weights
        if self.dropout is not None:
            factors = self.dropout.factors(weights)
            kept = weights * factors
            dweights *= factors
        _add(into.v, kept.mT @ gradient, keys)
        if into.value_rows is not None:
            _add_rows(into.value_rows[:, at], unskew(kept).mT @ gradient)
        if sinks is not None and d_sinks is not None:
            shares = (sinks - lse).exp().masked_fill(lse.isneginf(), 0.0)
            d_sinks.sub_((shares * delta).sum_to_size(d_sinks.shape))
        ds = dweights.sub_(delta).mul_(weights)
        if tangent is not None:
            ds *= 1 - tangent.square_()
        self._add_terms(into, ds)
        _add(into.q, ds @ x.k[:, :, keys] * self.scale, rows)
        _add(into.k, ds.mT @ x.q[:, :, rows] * self.scale, keys)

    def _add_terms(self, into: Operands, ds: Float[Tensor, "1 h Q K"]) -> None:
        """Add the gradients of the terms, from those of the logits."""
        x, at = self.x, self.offsets
        if into.column is not None:
            into.column[:, :, self.keys] += ds.sum(2)
        if into.bias_by_offset is not None or x.left is not None:
            by_offset = unskew(ds)
            if into.bias_by_offset is not None:
                into.bias_by_offset[:, at] += by_offset.sum((0, 2))
            if x.left is not None and x.left_rows is not None:
                _add(into.left, by_offset @ x.left_rows[:, at], self.rows)
                if into.left_rows is not None:
                    _add_rows(into.left_rows[:, at], by_offset.mT @ x.left[:, :, self.rows])
        if x.right is not None and x.right_rows is not None:
            for tile, offsets in self._tiles():
                here = slice(tile.start - self.keys.start, tile.stop - self.keys.start)
                by_offset = unskew(ds[..., here].mT)
                _add(into.right, by_offset @ x.right_rows[:, offsets].flip(1), tile)
                if into.right_rows is not None:
                    rows = (by_offset.mT @ x.right[:, :, tile]).flip(2)
                    _add_rows(into.right_rows[:, offsets], rows)

    def _own(self, sinks: Tensor | None) -> Float[Tensor, "1 h q 1"] | None:
        """Those of the rows, or the one of all."""
        if sinks is None:
            return None
        return (sinks if sinks.shape[2] == 1 else sinks[:, :, self.rows]).unsqueeze(-1)

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Keys, no more than there are queries, and their offsets: products over them are square.

        The skew of a product in descending order of the offset has keys in its rows.
        """
        size, first = self.rows.stop - self.rows.start, self.offsets.start - self.keys.start
        for begin in range(self.keys.start, self.keys.stop, size):
            tile = slice(begin, min(begin + size, self.keys.stop))
            yield tile, slice(first + begin, first + begin + self._width(tile))

    def _width(self, keys: slice) -> int:
        return int(self.rows.stop - self.rows.start + keys.stop - keys.start - 1)


def _add(into: Tensor | None, gradient: Tensor, tokens: slice) -> None:
    if into is not None:
        into[:, :, tokens] += gradient


def _add_rows(into: Float[Tensor, "h W F"], gradient: Float[Tensor, "1 H W F"]) -> None:
    """Add to rows that heads may share."""
    into += gradient.sum((0, 1) if len(into) == 1 else 0)


def _blocks(record: KernelProblem, x: Operands) -> Iterator[tuple[int, slice, Block]]:
    """All blocks, with their batch rows and heads."""
    (batch, heads, queries, _), keys = x.q.shape, x.k.shape[2]
    device, geometry = x.q.device, record.geometry
    band = Band(geometry.shift, geometry.lowest, geometry.highest)
    budget = BUDGET.get(device.type, MANY)
    reach = min(keys, max(1, band.last - band.first) + ROWS)
    size = max(1, min(queries, ROWS, budget // reach))
    together = max(1, min(heads, budget // (size * reach)))
    query, key = (torch.arange(count, device=device).unsqueeze(0) for count in (queries, keys))
    seed = 0 if record.seed is None else int(record.seed)
    for row in range(batch):
        for head in range(0, heads, together):
            lanes = slice(head, min(heads, head + together))
            part = x.part(row, lanes)
            for begin in range(0, queries, size):
                rows = slice(begin, min(queries, begin + size))
                seen = band.keys(rows.start, rows.stop, keys)
                keyed = None
                if record.dropout:
                    numbered = query[:, rows], key[:, seen]
                    keyed = KeyedDropout(record.dropout, seed + row, *numbered, first_head=head)
                hidden = band.hidden(rows, seen, device)
                block = Block(part, rows, seen, record.scale, record.softcap, hidden, keyed)
                yield row, lanes, block


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``."""
    x, (output, lse) = Operands.of(record, ()), _empty_output(record)
    for row, heads, block in _blocks(record, x):
        output[row, heads, block.rows], lse[row, heads, block.rows] = block.attend()
    return output, lse


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], part: bool
) -> Gradients:
    """Gradients by their paths, of what is wanted; see ``Operator``."""
    gradient, *given = results
    x, flat = Operands.of(record, given), flatten(record, SCHEMA)
    into = {
        path: y.new_zeros(y.shape)
        for path, y in by_path(flat.tensors, flat.words).items()
        if path in wanted
    }
    absent: dict[str, Any] = dict.fromkeys(field.name for field in fields(Operands))
    sums = Operands(**absent | {path.rpartition(".")[2]: y for path, y in into.items()})
    for row, heads, block in _blocks(record, x):
        block.differentiate(sums.part(row, heads), gradient[row : row + 1, heads, block.rows])
    return into


def _empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    q, v = record.q, record.v
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    return x.new_empty(x.shape) if wanted else None


BLOCKWISE = Operator("blockwise", compute_output, compute_gradients, _empty_output, _empty_gradient)
