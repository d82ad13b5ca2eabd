"""Structured terms over a regular grid, a block of queries at a time, with a backward of its own.

Terms are read by offset as in ``regular``. A block of Q queries and K keys meets W = Q + K - 1
offsets; what depends on a token and an offset is one product ``[Q, W]``, of which row i holds the
block's logits from column Q - 1 - i on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.attention.backends.common.base import kernel_gradients
from posenc.attention.dropout import KeyedDropout

ROWS = 128
"""Queries of a block."""

BUDGET = {"cpu": 2**19}
"""Logits of a block by device, so that the few tensors of them stay in a core's cache."""

MANY = 2**24
"""The same on accelerators."""


@dataclass(frozen=True, eq=False)
class Operands:
    """Tensors of a problem, all of one dtype; see ``regular``.

    Args:
        q: ``[B, H, Q, D]``; k: ``[B, H, K, D]``; v: ``[B, H, K, E]``.
        bias_by_offset: ``[H, Q + K - 1]``.
        left, left_rows, right, right_rows, column, value_rows: as of ``Regular``.
        sinks: ``[H]``.
        output, lse: over more keys than these, ``[B, H, Q, E]`` and ``[B, H, Q]``.
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
    sinks: Float[Tensor, " H"] | None = None
    output: Float[Tensor, "B H Q E"] | None = None
    lse: Float[Tensor, "B H Q"] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: str) -> Operands:
        return cls(**dict(zip(names.split(), tensors, strict=True)))

    def flat(self) -> tuple[list[Tensor], str]:
        """The tensors that are there, and their names."""
        named = {x.name: getattr(self, x.name) for x in fields(self)}
        present = {name: x for name, x in named.items() if x is not None}
        return list(present.values()), " ".join(present)

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


BATCHED = {"q", "k", "v", "left", "right", "column", "output", "lse"}


@dataclass(frozen=True)
class Band:
    """A regular grid's offsets ``shift + j - i``, and those that it shows: first to last."""

    shift: int
    first: int
    last: int

    @classmethod
    def of(cls, band: Sequence[int], queries: int, keys: int) -> Band:
        """From shift, causal flag, and window or -1."""
        shift, causal, window = band
        first, last = shift - queries + 1, shift + keys - 1
        if window >= 0:
            first, last = max(first, 1 - window), min(last, window - 1)
        return cls(shift, first, min(last, 0) if causal else last)

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
        sinks = None if x.sinks is None else x.sinks.view(-1, 1, 1)
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
        assert x.output is not None
        assert x.lse is not None
        lse = x.lse[:, :, rows, None]
        delta = (gradient * x.output[:, :, rows]).sum(-1, keepdim=True)
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
        if into.sinks is not None and x.sinks is not None:
            shares = (x.sinks.view(-1, 1, 1) - lse).exp().masked_fill(lse.isneginf(), 0.0)
            into.sinks.sub_((shares * delta).sum((0, 2, 3)))
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


def _blocks(
    x: Operands, numbers: tuple[Sequence[int], float, float, float, int]
) -> Iterator[tuple[int, slice, Block]]:
    """All blocks, with their batch rows and heads."""
    band_numbers, scale, softcap, dropout, seed = numbers
    (batch, heads, queries, _), keys = x.q.shape, x.k.shape[2]
    device, band = x.q.device, Band.of(band_numbers, queries, keys)
    budget = BUDGET.get(device.type, MANY)
    reach = min(keys, max(1, band.last - band.first) + ROWS)
    size = max(1, min(queries, ROWS, budget // reach))
    together = max(1, min(heads, budget // (size * reach)))
    query, key = (torch.arange(count, device=device).unsqueeze(0) for count in (queries, keys))
    for row in range(batch):
        for head in range(0, heads, together):
            lanes = slice(head, min(heads, head + together))
            part = x.part(row, lanes)
            for begin in range(0, queries, size):
                rows = slice(begin, min(queries, begin + size))
                seen = band.keys(rows.start, rows.stop, keys)
                keyed = None
                if dropout:
                    numbered = query[:, rows], key[:, seen]
                    keyed = KeyedDropout(dropout, seed + row, *numbered, first_head=head)
                hidden = band.hidden(rows, seen, device)
                yield row, lanes, Block(part, rows, seen, scale, softcap, hidden, keyed)


@torch.library.custom_op("posenc::blockwise", mutates_args=())
def blockwise(
    tensors: Sequence[Tensor],
    names: str,
    wants: Sequence[bool],
    band: Sequence[int],
    scale: float,
    softcap: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``; those over more keys are returned as given.

    Args:
        tensors: those of ``Operands`` that are there; names: theirs, with spaces between.
        wants: whether the gradient of each will be wanted.
        band: the grid's shift, whether it is causal, and its window or -1.
        softcap: 0 for none.
    """
    x = Operands.of(tensors, names)
    if x.output is not None and x.lse is not None:
        return x.output.clone(), x.lse.clone()
    output, lse = x.v.new_empty(*x.q.shape[:3], x.v.shape[3]), x.q.new_empty(x.q.shape[:3])
    for row, heads, block in _blocks(x, (band, scale, softcap, dropout, seed)):
        output[row, heads, block.rows], lse[row, heads, block.rows] = block.attend()
    return output, lse


@blockwise.register_fake
def _(tensors: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    q, v = tensors[0], tensors[2]
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


@torch.library.custom_op("posenc::blockwise_backward", mutates_args=())
def blockwise_backward(
    gradient: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    wants: Sequence[bool],
    band: Sequence[int],
    numbers: Sequence[float],
    seed: int,
) -> list[Tensor]:
    """Gradients of the tensors of ``blockwise``; empty where not wanted.

    Args:
        tensors, names, wants: of ``blockwise``, with ``output`` and ``lse``.
        numbers: scale, softcap and dropout.
    """
    x = Operands.of(tensors, names)
    named = zip(names.split(), tensors, wants, strict=True)
    into = {name: torch.zeros(y.shape, dtype=y.dtype, device=y.device) for name, y, w in named if w}
    absent = {field.name: None for field in fields(Operands)}
    sums = Operands(**{**absent, **into})  # type: ignore[arg-type]
    scale, softcap, dropout = numbers
    for row, heads, block in _blocks(x, (band, scale, softcap, dropout, seed)):
        block.differentiate(sums.part(row, heads), gradient[row : row + 1, heads, block.rows])
    return [into.get(name, x.q.new_empty(0)) for name in names.split()]


@blockwise_backward.register_fake
def _(
    gradient: Tensor, tensors: Sequence[Tensor], names: str, wants: Sequence[bool], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape if w else 0) for x, w in zip(tensors, wants, strict=True)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given, ctx.names, ctx.wants, ctx.band, *ctx.numbers, ctx.seed = inputs
    ctx.save_for_backward(*given, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    tensors, names, wants = list(ctx.saved_tensors), ctx.names, list(ctx.wants)
    count = len(wants)
    if "output" in names.split():  # given over more keys
        del tensors[count:]
    else:
        names, wants = names + " output lse", [*wants, False, False]
    found = blockwise_backward(gradient, tensors, names, wants, ctx.band, ctx.numbers, ctx.seed)
    gradients = [x if want else None for x, want in zip(found[:count], ctx.wants, strict=True)]
    return (gradients, *(None for _ in range(7)))


blockwise.register_autograd(kernel_gradients(_differentiate), setup_context=_keep)
