"""One pass over some heads of one batch row, block of queries by block of queries.

Each block meets its keys in stretches. What PyTorch's fused CPU kernel can do it does: stretches
whose pairs all read one bucket (a number a query and one a key, and a constant value, are then all
that is added) and stretches with no more than a line of offsets, which it reads as its mask
through a view. All other stretches are done in tiles of our own, and so is everything on other
devices. Partial outputs are joined by their totals.

Gradients of logits sum to zero over all keys of a query. So the sum over the outermost bucket on
one side, which the fused kernel keeps to itself, is what is missing from the others; on the other
side it follows from that part's own output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.gradients import BackwardTiles, far_terms
from posenc.attention.backends.tiled.operands import Operands, reversed_rows
from posenc.attention.backends.tiled.plan import Band, Kind, Stretch
from posenc.attention.backends.tiled.stock import Partial, join, stock_backward, stock_forward
from posenc.attention.backends.tiled.tiles import Dropout, Tiles
from posenc.attention.views import strided_view

__all__ = ["TILE", "BackwardPass", "ForwardPass", "Saved", "fused", "sums_ahead"]

BLOCK = 512
"""Queries a block where a line of offsets is all there is to add, and hides pairs."""

TILE = (256, 1024)
"""Queries and keys a tile of our own; the same in both directions, as the dropout wants it. With
anything but a line to add, a block has as many queries."""


@dataclass(frozen=True, eq=False)
class Saved:
    """What the backward pass needs beside the operands.

    Args:
        whole: output and total over all keys.
        ahead: output and total over the keys far ahead; None where nothing needs them.
    """

    whole: Partial
    ahead: Partial | None

    def part(self, batch: int, heads: tuple[int, int]) -> Saved:
        """The same for some heads of one batch row."""
        ahead = None if self.ahead is None else self.ahead.part(batch, heads)
        return Saved(self.whole.part(batch, heads), ahead)

    def block(self, begin: int, end: int) -> Saved:
        """The same for queries counted from the last one, reversed."""
        ahead = None if self.ahead is None else self.ahead.block(begin, end)
        return Saved(self.whole.block(begin, end), ahead)


def fused(x: Operands, dropout: Dropout | None) -> bool:
    """Whether the fused kernel can be used at all."""
    return x.q.device.type == "cpu" and dropout is None and x.q.shape[-1] == x.v.shape[-1]


class Pass:
    """Some heads of one batch row, which all see the same band.

    Args:
        line: whether the gradient of a line that is all there is wants tiles of our own.
        ahead: whether what lies far ahead is to be met apart from all else.
    """

    def __init__(
        self,
        x: Operands,
        band: Band,
        dropout: Dropout | None,
        *,
        line: bool = False,
        ahead: bool = False,
    ) -> None:
        self.stock = fused(x, dropout)
        self.needs_tiles = not (self.stock and x.table_only) or line
        self.rows = TILE[0]
        if self.stock and x.table_only:  # outermost buckets are read as all others are
            band = replace(band, behind=None, ahead=band.ahead if ahead else None)
            if not self.needs_tiles and not ahead:
                self.rows = band.queries if band.whole else BLOCK
        self.x, self.band, self.dropout = x, band, dropout
        self.line = None
        if x.line is not None or not band.whole:
            self.line = x.masked_line(band)

    def stock_serves(self, stretch: Stretch) -> bool:
        """Whether the fused kernel can do a stretch, forward."""
        return self.stock and (stretch.kind != "near" or self.x.value_rows is None)

    def mask(self, begin: int, end: int, stretch: Stretch) -> Tensor | None:
        """What the fused kernel adds to the logits of a stretch: always a view."""
        low, high = stretch.begin, stretch.end
        if stretch.kind != "near":
            key = self.x.far_key(stretch.kind, low, high)
            return None if key is None else key.unsqueeze(2).expand(-1, -1, end - begin, -1)
        if self.line is None:
            return None
        size = (1, self.line.shape[0], end - begin, high - low)
        return strided_view(self.line, size, (0, self.line.shape[1], 1, 1), begin + low)


class ForwardPass(Pass):
    def __init__(
        self,
        x: Operands,
        band: Band,
        saved: Saved,
        dropout: Dropout | None,
        lane: int,
    ) -> None:
        super().__init__(x, band, dropout, ahead=saved.ahead is not None)
        self.saved = saved
        self.tiles = Tiles(x, self.line, TILE, dropout, lane) if self.needs_tiles else None

    def run(self) -> None:
        """Write the output and the totals of all queries."""
        for begin, end in self.band.blocks(self.rows):
            block, parts = self.x.block(begin, end), []
            if self.tiles is not None:
                self.tiles.start(begin, end, block)
            own: list[Stretch] = []
            for stretch in self.band.stretches(begin, end):
                if not self.stock_serves(stretch):
                    own.append(stretch)
                    continue
                if stretch.kind == "near" and self.tiles is not None:
                    parts += self._stock_tiles(begin, end, block, stretch)
                    continue
                part = self._stock(begin, end, block, stretch)
                parts.append(part)
                if stretch.kind == "ahead" and self.saved.ahead is not None:
                    self.saved.ahead.put(begin, end, part)
            if own and self.tiles is not None:
                parts.append(self.tiles.forward(own))
            if not parts:  # nothing is seen
                parts.append(Partial.nothing(block.q, self.x.v.shape[-1]))
            self.saved.whole.put(begin, end, join(parts))

    def _stock(self, begin: int, end: int, block: Operands, stretch: Stretch) -> Partial:
        low, high = stretch.begin, stretch.end
        k, v = block.k[:, :, low:high], block.v[:, :, low:high]
        part = stock_forward(block.q, k, v, self.mask(begin, end, stretch))
        if stretch.kind == "near":
            return self._honest(part, begin, end, low, high)
        total = part.total + block.far_query(stretch.kind)
        value = block.far_value(stretch.kind)
        return Partial(part.output if value is None else part.output + value, total)

    def _stock_tiles(
        self, begin: int, end: int, block: Operands, stretch: Stretch
    ) -> list[Partial]:
        """Tiles of what is added to the products, which the fused kernel reads as its mask."""
        assert self.tiles is not None
        parts = []
        for low, high in self.tiles.chunks(stretch):
            bias = self.tiles.bias(low, high)
            assert bias is not None  # there are terms beside a line
            k, v = block.k[:, :, low:high], block.v[:, :, low:high]
            part = stock_forward(block.q, k, v, bias.unsqueeze(0))
            parts.append(self._honest(part, begin, end, low, high))
        return parts

    def _honest(self, part: Partial, begin: int, end: int, low: int, high: int) -> Partial:
        """The part with the true total, -inf, of queries that see none of these keys."""
        if self.band.clear(begin, end, low, high):
            return part
        rows = torch.arange(begin, end, device=part.total.device)
        least = (self.band.first - rows).clamp(min=low)
        most = (self.band.last - rows).clamp(max=high - 1)
        return Partial(part.output, part.total.masked_fill(least > most, -torch.inf))


class BackwardPass(Pass):
    def __init__(
        self,
        x: Operands,
        band: Band,
        saved: Saved,
        gradient: Tensor,
        into: Operands,
        dropout: Dropout | None,
        lane: int,
    ) -> None:
        super().__init__(x, band, dropout, line=into.line is not None)
        self.saved, self.gradient, self.into = saved, gradient, into
        has_far = self.band.behind is not None or self.band.ahead is not None
        self.sums_wanted = has_far and (into.line is not None or into.left is not None)
        self.tiles = None
        if self.needs_tiles:
            self.tiles = BackwardTiles(x, self.line, TILE, dropout, lane)

    def run(self) -> None:
        """Add the gradients through all queries."""
        for begin, end in self.band.blocks(self.rows):
            block, into = self.x.block(begin, end), self.into.empty_block(end - begin)
            saved, gradient = self.saved.block(begin, end), reversed_rows(self.gradient, begin, end)
            stretches = self.band.stretches(begin, end)
            own = [stretch for stretch in stretches if not self._stock_serves(stretch)]
            sums = torch.zeros_like(block.q[..., 0])
            if self.tiles is not None and own:
                whole = saved.whole
                self.tiles.turn(begin, end, block, whole=whole, gradient=gradient, into=into)
                sums += self.tiles.backward(own, sums=self.sums_wanted)
            far: list[Kind] = []
            for stretch in stretches:
                if stretch not in own:
                    mask = self.mask(begin, end, stretch)
                    _add_stock(block, saved.whole, gradient, into, stretch, mask)
                    if stretch.kind != "near":
                        far.append(stretch.kind)
            if self.sums_wanted and "ahead" in far and "behind" in far:
                ahead = sums_ahead(saved, gradient)
                far_terms(block, into, "ahead", ahead)
                sums, far = sums + ahead, ["behind"]
            if self.sums_wanted and far:
                far_terms(block, into, far[0], -sums)
            self.into.put_block(begin, end, into)

    def _stock_serves(self, stretch: Stretch) -> bool:
        if not self.stock_serves(stretch):
            return False
        if stretch.kind == "near":
            return self.x.table_only and self.into.line is None
        return self.x.right is None and self.x.column is None


def _add_stock(
    x: Operands,
    whole: Partial,
    gradient: Float[Tensor, "1 H R E"],
    into: Operands,
    stretch: Stretch,
    mask: Tensor | None,
) -> None:
    """Add the gradients through one stretch, by the fused kernel, of a block of queries."""
    low, high = stretch.begin, stretch.end
    if stretch.kind != "near":
        value = x.far_value(stretch.kind)
        output = whole.output if value is None else whole.output - value
        whole = Partial(output, whole.total - x.far_query(stretch.kind))
    k, v = x.k[:, :, low:high], x.v[:, :, low:high]
    found = stock_backward(gradient, x.q, k, v, whole, mask)
    into.q.add_(found[0])
    into.k[:, :, low:high] += found[1]
    into.v[:, :, low:high] += found[2]
    if into.value_rows is not None and stretch.kind != "near":
        sums = found[2].sum((0, 2))
        shared = into.value_rows.shape[0] == 1
        into.value_rows[:, x.far_place(stretch.kind)] += sums.sum(0) if shared else sums


def sums_ahead(saved: Saved, gradient: Float[Tensor, "1 H R E"]) -> Float[Tensor, "1 H R"]:
    """Sum of the gradients of the logits of keys far ahead, a query of a block."""
    assert saved.ahead is not None  # forward was told to keep it
    whole, ahead = saved.whole, saved.ahead
    total = whole.total.masked_fill(whole.total == -torch.inf, torch.inf)
    return (ahead.total - total).exp() * (gradient * (ahead.output - whole.output)).sum(-1)
