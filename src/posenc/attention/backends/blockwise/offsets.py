"""Structured terms over a regular grid, a block of queries at a time, with its backward pass.

Terms are read by offset. A block of Q queries and K keys meets W = Q + K - 1
offsets; what depends on a token and an offset is one product ``[Q, W]``, of which row i holds the
block's logits from column Q - 1 - i on.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.attention.backends.common.operator import Gradients, Operator
from posenc.attention.problem.problem import CounterDropout
from posenc.attention.problem.record import Geometry, KernelProblem
from posenc.attention.problem.terms import AXES, of_tokens

ROWS = 128
"""Queries of a block."""

BUDGET = {"cpu": 2**19}
"""Logits of a block by device, so that the few tensors of them stay in a core's cache."""

MANY = 2**24
"""Logits of a block on accelerators."""


Operands = dict[str, Tensor]
"""Tensors of a record, all of one dtype, or their gradients, by the last word of the path: q, k, v,
those of ``Terms``, read at all Q + K - 1 offsets, and sinks; with them the results, see below."""

RESULTS = ("output", "lse", "of_lse")
"""Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``, over more keys than these, and its gradient."""


def _named(tensors: dict[str, Tensor]) -> Operands:
    return {path.rpartition(".")[2]: x for path, x in tensors.items()}


def _of_heads(operands: Operands, batch: int, heads: slice) -> Operands:
    """Views of some heads of a batch row; a dimension that is shared stays."""

    def cut(name: str, x: Tensor) -> Tensor:
        if name not in AXES or of_tokens(name):
            x = x[batch : batch + 1] if len(x) > 1 else x
            return x[:, heads]
        return x[heads] if len(x) > 1 else x

    return {name: cut(name, x) for name, x in operands.items()}


def seen_keys(band: Geometry, rows: slice, count: int) -> slice:
    """Keys that some queries of a regular grid see; a single one where there is none."""
    low = min(max(0, rows.start + band.lowest - band.shift), count - 1)
    return slice(low, max(low + 1, min(count, rows.stop + band.highest - band.shift)))


def hidden_pairs(
    band: Geometry, rows: slice, keys: slice, device: torch.device
) -> Bool[Tensor, "Q K"] | None:
    """True where a pair of a regular grid is masked; None if none is."""
    lowest, highest = band.shift + keys.start - rows.stop + 1, band.shift + keys.stop - 1
    if band.lowest <= lowest and highest - rows.start <= band.highest:
        return None
    key = torch.arange(band.shift + keys.start, band.shift + keys.stop, device=device)
    offset = key - torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1)
    return (offset < band.lowest) | (offset > band.highest)


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
class QueryBlock:
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
    dropout: CounterDropout | None

    @property
    def offsets(self) -> slice:
        """Indices of the offsets between the rows and the keys."""
        first = self.keys.start - self.rows.stop + self.x["q"].shape[2]
        return slice(first, first + self._width(self.keys))

    def logits(self) -> tuple[Float[Tensor, "1 h Q K"], Tensor | None]:
        """Logits, -inf where masked, and the tangent that a cap multiplies them with."""
        x, keys = self.x, self.keys
        logits = x["q"][:, :, self.rows] @ x["k"][:, :, keys].mT * self.scale
        by_offset = None
        if "bias_by_offset" in x:
            by_offset = x["bias_by_offset"][:, None, self.offsets]
        if "left" in x:
            products = x["left"][:, :, self.rows] @ x["left_rows"][:, self.offsets].mT
            by_offset = products if by_offset is None else products.add_(by_offset)
        if by_offset is not None:
            by_offset = by_offset.expand(*by_offset.shape[:-2], logits.shape[2], -1)
            logits += skew(by_offset, logits.shape[3])
        if "right" in x:
            for tile, offsets in self._tiles():
                products = x["right"][:, :, tile] @ x["right_rows"][:, offsets].flip(1).mT
                here = slice(tile.start - keys.start, tile.stop - keys.start)
                logits[..., here] += skew(products, logits.shape[2]).mT
        if "column" in x:
            logits += x["column"][:, :, None, keys]
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
        sinks = self._row_sinks(x.get("sinks"))
        if sinks is not None:
            row_max = row_max.maximum(sinks)
        row_max = row_max.clamp(min=torch.finfo(weights.dtype).min)  # of rows that see nothing
        total = weights.sub_(row_max).exp_().sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - row_max).exp()
        lse = (total.log() + row_max).squeeze(-1)
        if self.dropout is not None:
            weights *= self.dropout.factors(weights)
        output = weights @ x["v"][:, :, self.keys]
        if "value_rows" in x:
            output += unskew(weights) @ x["value_rows"][:, self.offsets]
        return output / total.masked_fill(total == 0, 1.0), lse

    def differentiate(self, into: Operands, gradient: Float[Tensor, "1 h Q E"]) -> None:
        """Add the gradients through this block to those of the same heads that are wanted."""
        x, rows, keys, at = self.x, self.rows, self.keys, self.offsets
        sinks, d_sinks = self._row_sinks(x.get("sinks")), self._row_sinks(into.get("sinks"))
        lse = x["lse"][:, :, rows, None]
        delta = (gradient * x["output"][:, :, rows]).sum(-1, keepdim=True)
        if "of_lse" in x:
            delta = delta - x["of_lse"][:, :, rows, None]
        logits, tangent = self.logits()
        weights = logits.sub_(lse.masked_fill(lse.isneginf(), torch.inf)).exp_()
        dweights = gradient @ x["v"][:, :, keys].mT
        if "value_rows" in x:
            dweights += skew(gradient @ x["value_rows"][:, at].mT, dweights.shape[3])
        after_dropout = weights
        if self.dropout is not None:
            factors = self.dropout.factors(weights)
            after_dropout = weights * factors
            dweights *= factors
        _add(into.get("v"), after_dropout.mT @ gradient, keys)
        if "value_rows" in into:
            _add_rows(into["value_rows"][:, at], unskew(after_dropout).mT @ gradient)
        if sinks is not None and d_sinks is not None:
            shares = (sinks - lse).exp().masked_fill(lse.isneginf(), 0.0)
            d_sinks.sub_((shares * delta).sum_to_size(d_sinks.shape))
        ds = dweights.sub_(delta).mul_(weights)
        if tangent is not None:
            ds *= 1 - tangent.square_()
        self._add_terms(into, ds)
        _add(into.get("q"), ds @ x["k"][:, :, keys] * self.scale, rows)
        _add(into.get("k"), ds.mT @ x["q"][:, :, rows] * self.scale, keys)

    def _add_terms(self, into: Operands, ds: Float[Tensor, "1 h Q K"]) -> None:
        """Add the gradients of the terms, from those of the logits."""
        x, at = self.x, self.offsets
        if "column" in into:
            into["column"][:, :, self.keys] += ds.sum(2)
        if "bias_by_offset" in into or "left" in x:
            by_offset = unskew(ds)
            if "bias_by_offset" in into:
                into["bias_by_offset"][:, at] += by_offset.sum((0, 2))
            if "left" in x:
                _add(into.get("left"), by_offset @ x["left_rows"][:, at], self.rows)
                if "left_rows" in into:
                    _add_rows(into["left_rows"][:, at], by_offset.mT @ x["left"][:, :, self.rows])
        if "right" in x:
            for tile, offsets in self._tiles():
                here = slice(tile.start - self.keys.start, tile.stop - self.keys.start)
                by_offset = unskew(ds[..., here].mT)
                _add(into.get("right"), by_offset @ x["right_rows"][:, offsets].flip(1), tile)
                if "right_rows" in into:
                    rows = (by_offset.mT @ x["right"][:, :, tile]).flip(2)
                    _add_rows(into["right_rows"][:, offsets], rows)

    def _row_sinks(self, sinks: Tensor | None) -> Float[Tensor, "1 h q 1"] | None:
        """Sinks of the block's rows, or one sink for all rows."""
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


def _blocks(record: KernelProblem, x: Operands) -> Iterator[tuple[int, slice, QueryBlock]]:
    """All blocks, with their batch rows and heads."""
    (batch, heads, queries, _), keys = record.q.shape, record.k.shape[2]
    device, band = record.q.device, record.geometry
    budget = BUDGET.get(device.type, MANY)
    reach = min(keys, max(1, band.highest - band.lowest) + ROWS)
    size = max(1, min(queries, ROWS, budget // reach))
    together = max(1, min(heads, budget // (size * reach)))
    query, key = (torch.arange(count, device=device).unsqueeze(0) for count in (queries, keys))
    seed = 0 if record.seed is None else int(record.seed)
    for row in range(batch):
        for head in range(0, heads, together):
            lanes = slice(head, min(heads, head + together))
            head_operands = _of_heads(x, row, lanes)
            for begin in range(0, queries, size):
                rows = slice(begin, min(queries, begin + size))
                visible_keys = seen_keys(band, rows, keys)
                dropout = None
                if record.dropout:
                    numbered = query[:, rows], key[:, visible_keys]
                    dropout = CounterDropout(record.dropout, seed + row, *numbered, first_head=head)
                hidden = hidden_pairs(band, rows, visible_keys, device)
                block = QueryBlock(
                    head_operands, rows, visible_keys, record.scale, record.softcap, hidden, dropout
                )
                yield row, lanes, block


def compute_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, E]`` and LSE ``[B, H, Q]``."""
    x, (output, lse) = _named(_tensors(record)), _empty_output(record)
    for row, heads, block in _blocks(record, x):
        output[row, heads, block.rows], lse[row, heads, block.rows] = block.attend()
    return output, lse


def compute_gradients(
    record: KernelProblem, results: Sequence[Tensor], wanted: Container[str], global_lse: bool
) -> Gradients:
    """Gradients by their paths, of what is wanted; see ``Operator``."""
    (gradient, *saved), tensors = results, _tensors(record)
    x = _named(tensors) | dict(zip(RESULTS, saved, strict=False))
    into = {path: y.new_zeros(y.shape) for path, y in tensors.items() if path in wanted}
    for row, heads, block in _blocks(record, x):
        sums = _of_heads(_named(into), row, heads)
        block.differentiate(sums, gradient[row : row + 1, heads, block.rows])
    return into


def _tensors(record: KernelProblem) -> dict[str, Tensor]:
    """Tensors of a record that may require gradients, by path."""
    sinks = {} if record.sinks is None else {"sinks": record.sinks}
    terms = {f"terms.{name}": x for name, x in record.terms.operands()}
    return {"q": record.q, "k": record.k, "v": record.v} | terms | sinks


def _empty_output(record: KernelProblem) -> tuple[Tensor, Tensor]:
    q, v = record.q, record.v
    return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


def _empty_gradient(path: str, x: Tensor, wanted: bool) -> Tensor | None:
    return x.new_empty(x.shape) if wanted else None


BLOCKWISE = Operator("blockwise", compute_output, compute_gradients, _empty_output, _empty_gradient)
