"""One pass over some heads of one batch row, block of queries by block of queries.

Each block meets its keys in key_ranges. What PyTorch's fused CPU kernel can do it does: key ranges
whose pairs all read one bucket (a number a query and one a key, and a constant value, are then all
that is added) and key ranges with no more than an offset bias, which it reads as its mask
through a view. All other key ranges are done in tiles of our own, and so is everything on other
devices. Partial outputs are joined by their LSE.

Gradients of logits sum to zero over all keys of a query. So the sum over the outermost bucket on
one side, which the fused kernel keeps to itself, is what is missing from the others; on the other
side it follows from that part's own output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.band import Band, KeyRange, Kind
from posenc.attention.backends.tiled.gradients import BackwardTiles, far_terms
from posenc.attention.backends.tiled.operands import Operands, reversed_rows
from posenc.attention.backends.tiled.sdpa_cpu import (
    Partial,
    join,
    sdpa_cpu_backward,
    sdpa_cpu_forward,
)
from posenc.attention.backends.tiled.tiles import Dropout, Tiles
from posenc.attention.views import strided_view

BLOCK = 512
"""Queries a block where an offset bias is all there is to add, and hides pairs."""

TILE = (256, 1024)
"""Queries and keys a tile of our own; the same in both directions, as dropout requires. With
anything but an offset bias to add, a block has as many queries."""


@dataclass(frozen=True, eq=False)
class Saved:
    """Results of the forward pass that the backward pass needs.

    Args:
        whole: output and LSE over all keys.
        ahead: output and LSE over the keys far ahead; None where nothing needs them.
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
    """True if the fused kernel can be used at all."""
    return x.q.device.type == "cpu" and dropout is None and x.q.shape[-1] == x.v.shape[-1]


class Pass:
    """Some heads of one batch row, which all see the same band.

    Args:
        bias_wanted: whether the gradient of the offset bias needs tiles where it is the only term.
        ahead: whether what lies far ahead is to be met apart from all else.
    """

    def __init__(
        self,
        x: Operands,
        band: Band,
        dropout: Dropout | None,
        *,
        bias_wanted: bool = False,
        ahead: bool = False,
    ) -> None:
        self.use_sdpa_cpu = fused(x, dropout)
        self.needs_tiles = not (self.use_sdpa_cpu and x.table_only) or bias_wanted
        self.rows = TILE[0]
        if self.use_sdpa_cpu and x.table_only:  # outermost buckets are read as all others are
            band = replace(band, behind=None, ahead=band.ahead if ahead else None)
            if not self.needs_tiles and not ahead:
                self.rows = band.queries if band.whole else BLOCK
        self.x, self.band, self.dropout = x, band, dropout
        self.bias = None
        if x.bias_by_offset is not None or not band.whole:
            self.bias = x.masked_bias(band)

    def sdpa_cpu_serves(self, key_range: KeyRange) -> bool:
        """True if the fused kernel can compute a key range, forward."""
        return self.use_sdpa_cpu and (key_range.kind != "near" or self.x.value_rows is None)

    def mask(self, begin: int, end: int, key_range: KeyRange) -> Tensor | None:
        """The fused kernel's mask for a key range: always a view."""
        low, high = key_range.begin, key_range.end
        if key_range.kind != "near":
            key = self.x.far_key(key_range.kind, low, high)
            return None if key is None else key.unsqueeze(2).expand(-1, -1, end - begin, -1)
        if self.bias is None:
            return None
        size = (1, self.bias.shape[0], end - begin, high - low)
        return strided_view(self.bias, size, (0, self.bias.shape[1], 1, 1), begin + low)


class ForwardPass(Pass):
    def __init__(
        self, x: Operands, band: Band, saved: Saved, dropout: Dropout | None, lane: int
    ) -> None:
        super().__init__(x, band, dropout, ahead=saved.ahead is not None)
        self.saved = saved
        self.tiles = Tiles(x, self.bias, TILE, dropout, lane) if self.needs_tiles else None

    def run(self) -> None:
        """Write the output and the LSE of all queries."""
        for begin, end in self.band.blocks(self.rows):
            block, parts = self.x.block(begin, end), []
            if self.tiles is not None:
                self.tiles.start(begin, end, block)
            own: list[KeyRange] = []
            for key_range in self.band.key_ranges(begin, end):
                if not self.sdpa_cpu_serves(key_range):
                    own.append(key_range)
                    continue
                if key_range.kind == "near" and self.tiles is not None:
                    parts += self._sdpa_cpu_tiles(begin, end, block, key_range)
                    continue
                part = self._sdpa_cpu(begin, end, block, key_range)
                parts.append(part)
                if key_range.kind == "ahead" and self.saved.ahead is not None:
                    self.saved.ahead.put(begin, end, part)
            if own and self.tiles is not None:
                parts.append(self.tiles.forward(own))
            if not parts:  # nothing is seen
                parts.append(Partial.nothing(block.q, self.x.v.shape[-1]))
            self.saved.whole.put(begin, end, join(parts))

    def _sdpa_cpu(self, begin: int, end: int, block: Operands, key_range: KeyRange) -> Partial:
        low, high = key_range.begin, key_range.end
        k, v = block.k[:, :, low:high], block.v[:, :, low:high]
        part = sdpa_cpu_forward(block.q, k, v, self.mask(begin, end, key_range))
        if key_range.kind == "near":
            return self._with_masked_lse(part, begin, end, low, high)
        lse = part.lse + block.far_query(key_range.kind)
        value = block.far_value(key_range.kind)
        return Partial(part.output if value is None else part.output + value, lse)

    def _sdpa_cpu_tiles(
        self, begin: int, end: int, block: Operands, key_range: KeyRange
    ) -> list[Partial]:
        """Tiles of what is added to the products, which the fused kernel reads as its mask."""
        assert self.tiles is not None
        parts = []
        for low, high in self.tiles.chunks(key_range):
            bias = self.tiles.bias(low, high)
            assert bias is not None  # there are terms beside an offset bias
            k, v = block.k[:, :, low:high], block.v[:, :, low:high]
            part = sdpa_cpu_forward(block.q, k, v, bias.unsqueeze(0))
            parts.append(self._with_masked_lse(part, begin, end, low, high))
        return parts

    def _with_masked_lse(self, part: Partial, begin: int, end: int, low: int, high: int) -> Partial:
        """The part, with LSE −inf for queries that see none of these keys."""
        if self.band.clear(begin, end, low, high):
            return part
        rows = torch.arange(begin, end, device=part.lse.device)
        least = (self.band.first - rows).clamp(min=low)
        most = (self.band.last - rows).clamp(max=high - 1)
        return Partial(part.output, part.lse.masked_fill(least > most, -torch.inf))


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
        super().__init__(x, band, dropout, bias_wanted=into.bias_by_offset is not None)
        self.saved, self.gradient, self.into = saved, gradient, into
        has_far = self.band.behind is not None or self.band.ahead is not None
        self.sums_wanted = has_far and (into.bias_by_offset is not None or into.left is not None)
        self.tiles = None
        if self.needs_tiles:
            self.tiles = BackwardTiles(x, self.bias, TILE, dropout, lane)

    def run(self) -> None:
        """Add the gradients through all queries."""
        for begin, end in self.band.blocks(self.rows):
            block, into = self.x.block(begin, end), self.into.empty_block(end - begin)
            saved, gradient = self.saved.block(begin, end), reversed_rows(self.gradient, begin, end)
            key_ranges = self.band.key_ranges(begin, end)
            own = [key_range for key_range in key_ranges if not self._sdpa_cpu_serves(key_range)]
            sums = torch.zeros_like(block.q[..., 0])
            if self.tiles is not None and own:
                whole = saved.whole
                self.tiles.start_backward(
                    begin, end, block, whole=whole, gradient=gradient, into=into
                )
                sums += self.tiles.backward(own, sums=self.sums_wanted)
            far: list[Kind] = []
            for key_range in key_ranges:
                if key_range not in own:
                    mask = self.mask(begin, end, key_range)
                    _add_sdpa_cpu(block, saved.whole, gradient, into, key_range, mask)
                    if key_range.kind != "near":
                        far.append(key_range.kind)
            if self.sums_wanted and "ahead" in far and "behind" in far:
                ahead = sums_ahead(saved, gradient)
                far_terms(block, into, "ahead", ahead)
                sums, far = sums + ahead, ["behind"]
            if self.sums_wanted and far:
                far_terms(block, into, far[0], -sums)
            self.into.put_block(begin, end, into)

    def _sdpa_cpu_serves(self, key_range: KeyRange) -> bool:
        if not self.sdpa_cpu_serves(key_range):
            return False
        if key_range.kind == "near":
            return self.x.table_only and self.into.bias_by_offset is None
        return self.x.right is None and self.x.column is None


def _add_sdpa_cpu(
    x: Operands,
    whole: Partial,
    gradient: Float[Tensor, "1 H R E"],
    into: Operands,
    key_range: KeyRange,
    mask: Tensor | None,
) -> None:
    """Add the gradients through one key range, by the fused kernel, of a block of queries."""
    low, high = key_range.begin, key_range.end
    if key_range.kind != "near":
        value = x.far_value(key_range.kind)
        output = whole.output if value is None else whole.output - value
        whole = Partial(output, whole.lse - x.far_query(key_range.kind))
    k, v = x.k[:, :, low:high], x.v[:, :, low:high]
    found = sdpa_cpu_backward(gradient, x.q, k, v, whole, mask)
    into.q.add_(found[0])
    into.k[:, :, low:high] += found[1]
    into.v[:, :, low:high] += found[2]
    if into.value_rows is not None and key_range.kind != "near":
        sums = found[2].sum((0, 2))
        shared = into.value_rows.shape[0] == 1
        into.value_rows[:, x.far_place(key_range.kind)] += sums.sum(0) if shared else sums


def sums_ahead(saved: Saved, gradient: Float[Tensor, "1 H R E"]) -> Float[Tensor, "1 H R"]:
    """Sum of the gradients of the logits of keys far ahead, a query of a block."""
    assert saved.ahead is not None  # forward was told to keep it
    whole, ahead = saved.whole, saved.ahead
    lse = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
    return (ahead.lse - lse).exp() * (gradient * (ahead.output - whole.output)).sum(-1)
