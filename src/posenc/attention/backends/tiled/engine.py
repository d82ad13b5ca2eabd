"""Forward and backward over a whole regular problem, block of queries by block of queries.

Each block meets its keys in stretches. What PyTorch's fused CPU kernel can do it does: stretches
whose pairs all read one bucket (a number a query and one a key, and a constant value, are then all
that is added) and stretches with no more than a line of offsets, which it reads as its mask
through a view. All other stretches are done in tiles of our own, and so is everything on other
devices. Partial outputs are joined by their totals.

Operands of logits sum to zero over all keys of a query. So the sum over the outermost bucket on
one side, which the fused kernel keeps to itself, is what is missing from the others; on the other
side it follows from that part's own output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.plan import Band, Kind, Stretch
from posenc.attention.backends.tiled.stock import Partial, join, stock_backward, stock_forward
from posenc.attention.backends.tiled.tiles import BackwardTiles, Dropout, Tiles, far_terms
from posenc.attention.backends.tiled.workers import side_by_side, workers

_Share = tuple[int, tuple[int, int], Band]

__all__ = ["Saved", "backward", "forward"]

BLOCK = 512
"""Queries a block where a line of offsets is all there is to add."""

TILE = (256, 1024)
"""Queries and keys a tile of our own; the same in both directions, as the dropout wants it. With
anything but a line to add, a block has as many queries."""

LANES = 4
"""Heads at a time at most, so that a tile of all of them stays in the cache."""

NARROW = 0.75
"""A head is worth calls of its own if it needs no more than this share of the places."""


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


def forward(
    x: Operands, band: Band, dropout: Dropout | None, *, line: bool, keep_ahead: bool
) -> Saved:
    """Attention of all queries.

    Args:
        line: whether the gradient of the line will be wanted.
        keep_ahead: keep what the backward pass will need for an outermost bucket ahead.
    """
    output = x.v.new_empty(*x.q.shape[:3], x.v.shape[-1])
    total = x.q.new_empty(x.q.shape[:3])
    saved = Saved(Partial(output, total), None)
    if keep_ahead and band.ahead is not None and band.behind is not None:
        ahead = Partial(torch.zeros_like(output), torch.full_like(total, -torch.inf))
        saved = Saved(saved.whole, ahead)

    def work(_: int, shares: Sequence[_Share]) -> None:
        for batch, heads, part in shares:
            lane = batch * x.q.shape[1] + heads[0]
            mine = x.part(batch, heads)
            _Forward(mine, part, saved.part(batch, heads), dropout, lane, line=line).run()

    side_by_side(work, _shares(x, band, constant=not line and dropout is None))
    return saved


class _Pass:
    """Some heads of one batch row, which all see the same band.

    Args:
        line: whether the gradient of the line is wanted. If not, and a line is all there is, the
            fused kernel does everything at once, and outermost buckets are no use.
    """

    def __init__(self, x: Operands, band: Band, dropout: Dropout | None, *, line: bool) -> None:
        stock = x.q.device.type == "cpu" and dropout is None and x.q.shape[-1] == x.v.shape[-1]
        if stock and x.table_only and not line:
            band = replace(band, behind=None, ahead=None)
        one_sided = band.first > 0 or band.last < band.queries + band.keys - 2
        if stock and x.table_only and band.behind is None and not one_sided:
            self.block = band.queries
        else:
            self.block = BLOCK if band.behind is None and x.table_only else TILE[0]
        self.x, self.band, self.dropout, self.stock = x, band, dropout, stock
        self.line = None
        if x.line is not None or one_sided:
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
        return self.line.as_strided(size, (0, self.line.stride(0), 1, 1), begin + low)


class _Forward(_Pass):
    def __init__(
        self,
        x: Operands,
        band: Band,
        saved: Saved,
        dropout: Dropout | None,
        lane: int,
        *,
        line: bool,
    ) -> None:
        super().__init__(x, band, dropout, line=line)
        self.saved = saved
        self.tiles = None
        if not (self.stock and x.table_only):
            self.tiles = Tiles(x, self.band, self.line, TILE, dropout, lane)

    def run(self) -> None:
        """Write the output and the totals of all queries."""
        for begin, end in self.band.blocks(self.block):
            parts: list[Partial] = []
            own: list[Stretch] = []
            for stretch in self.band.stretches(begin, end):
                if not self.stock_serves(stretch):
                    own.append(stretch)
                    continue
                if stretch.kind == "near" and self.tiles is not None:
                    parts += self._stock_tiles(begin, end, stretch)
                    continue
                part = self._stock(begin, end, stretch)
                parts.append(part)
                if stretch.kind == "ahead" and self.saved.ahead is not None:
                    self.saved.ahead.put(begin, end, part)
            if own or not parts:
                parts.append(self._own(begin, end, own))
            self.saved.whole.put(begin, end, join(parts))

    def _own(self, begin: int, end: int, stretches: list[Stretch]) -> Partial:
        if self.tiles is None:  # nothing is seen
            return Partial.nothing(self.x.q[:, :, begin:end], self.x.v.shape[-1])
        blocks = [
            self.tiles.forward(low, min(low + self.tiles.size[0], end), stretches)
            for low in range(begin, end, self.tiles.size[0])
        ]
        if len(blocks) == 1:
            return blocks[0]
        output = torch.cat([part.output for part in blocks], dim=2)
        return Partial(output, torch.cat([part.total for part in blocks], dim=2))

    def _stock(self, begin: int, end: int, stretch: Stretch) -> Partial:
        x, (low, high) = self.x, (stretch.begin, stretch.end)
        q, k, v = x.q[:, :, begin:end], x.k[:, :, low:high], x.v[:, :, low:high]
        part = stock_forward(q, k, v, self.mask(begin, end, stretch))
        if stretch.kind == "near":
            return self._honest(part, begin, end, low, high)
        total = part.total + x.far_query(stretch.kind, begin, end)
        value = x.far_value(stretch.kind)
        return Partial(part.output if value is None else part.output + value, total)

    def _stock_tiles(self, begin: int, end: int, stretch: Stretch) -> list[Partial]:
        """Tiles of what is added to the products, which the fused kernel reads as its mask."""
        assert self.tiles is not None
        x, parts = self.x, []
        for low, high in self.tiles.chunks(stretch):
            bias = self.tiles.bias(begin, end, low, high)
            assert bias is not None  # there are terms beside a line
            k, v = x.k[:, :, low:high], x.v[:, :, low:high]
            part = stock_forward(x.q[:, :, begin:end], k, v, bias.unsqueeze(0))
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


def backward(
    x: Operands,
    band: Band,
    saved: Saved,
    gradient: Float[Tensor, "B H Q E"],
    dropout: Dropout | None,
    *,
    line: bool,
) -> Operands:
    """Gradients of all operands, given that of the output.

    Args:
        line: whether the gradient of the line is wanted; without it far less has to be done.
    """
    shares = _shares(x, band, constant=not line and dropout is None)
    into = x.zeros(line=line)
    # What several shares add to is summed by each worker apart, then in order.
    sums = [into, *(into.apart() for _ in range(workers(len(shares)) - 1))]

    def work(worker: int, mine: Sequence[_Share]) -> None:
        for batch, heads, part in mine:
            _Backward(
                x.part(batch, heads),
                part,
                saved.part(batch, heads),
                gradient[batch : batch + 1, slice(*heads)],
                sums[worker].part(batch, heads),
                dropout,
                batch * x.q.shape[1] + heads[0],
            ).run()

    side_by_side(work, shares)
    for other in sums[1:]:
        into.add_shared(other)
    return into


class _Backward(_Pass):
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
        if not (self.stock and x.table_only and into.line is None):
            self.tiles = BackwardTiles(
                x,
                self.band,
                self.line,
                TILE,
                dropout,
                lane,
                whole=saved.whole,
                gradient=gradient,
                into=into,
            )

    def run(self) -> None:
        """Add the gradients through all queries."""
        for begin, end in self.band.blocks(self.block):
            stretches = self.band.stretches(begin, end)
            own = [stretch for stretch in stretches if not self._stock_serves(stretch)]
            sums = self._own(begin, end, own)
            far: list[Kind] = []
            for stretch in stretches:
                if stretch not in own:
                    self._stock(begin, end, stretch)
                    if stretch.kind != "near":
                        far.append(stretch.kind)
            if self.sums_wanted and far:
                self._far_sums(begin, end, far, sums)

    def _stock_serves(self, stretch: Stretch) -> bool:
        if not self.stock_serves(stretch):
            return False
        if stretch.kind == "near":
            return self.x.table_only and self.into.line is None
        return self.x.right is None and self.x.column is None

    def _own(self, begin: int, end: int, stretches: list[Stretch]) -> Float[Tensor, "1 H R"]:
        """Go through tiles of our own; the sums of the logits' gradients in them, a query."""
        if self.tiles is None or not stretches:
            return self.x.q.new_zeros(1, self.x.q.shape[1], end - begin)
        blocks = [
            self.tiles.backward(
                low, min(low + self.tiles.size[0], end), stretches, sums=self.sums_wanted
            )
            for low in range(begin, end, self.tiles.size[0])
        ]
        return torch.cat(blocks, dim=1).unsqueeze(0)

    def _far_sums(self, begin: int, end: int, far: list[Kind], sums: Tensor) -> None:
        """Gradients of what the outermost buckets add to the logits of the fused kernel."""
        if "ahead" in far and "behind" in far:
            ahead = self._sums_ahead(begin, end)
            far_terms(self.x, self.into, "ahead", begin, end, ahead)
            sums, far = sums + ahead, ["behind"]
        far_terms(self.x, self.into, far[0], begin, end, -sums)

    def _stock(self, begin: int, end: int, stretch: Stretch) -> None:
        x, into = self.x, self.into
        low, high = stretch.begin, stretch.end
        output = self.saved.whole.output[:, :, begin:end]
        total = self.saved.whole.total[:, :, begin:end]
        total = total.masked_fill(total == -torch.inf, torch.inf)
        if stretch.kind != "near":
            total = total - x.far_query(stretch.kind, begin, end)
            value = x.far_value(stretch.kind)
            output = output if value is None else output - value
        q, k, v = stock_backward(
            self.gradient[:, :, begin:end],
            x.q[:, :, begin:end],
            x.k[:, :, low:high],
            x.v[:, :, low:high],
            Partial(output, total),
            self.mask(begin, end, stretch),
        )
        into.q[:, :, begin:end] += q
        into.k[:, :, low:high] += k
        into.v[:, :, low:high] += v
        if into.value_rows is not None and stretch.kind != "near":
            sums = v.sum((0, 2))
            shared = into.value_rows.shape[0] == 1
            into.value_rows[:, x.far_place(stretch.kind)] += sums.sum(0) if shared else sums

    def _sums_ahead(self, begin: int, end: int) -> Float[Tensor, "1 H R"]:
        """Sum of the gradients of the logits of keys far ahead, a query."""
        assert self.saved.ahead is not None  # forward was told to keep it
        place = (slice(None), slice(None), slice(begin, end))
        whole, ahead = self.saved.whole, self.saved.ahead
        gap = ahead.output[place] - whole.output[place]
        total = whole.total[place]
        share = (ahead.total[place] - total.masked_fill(total == -torch.inf, torch.inf)).exp()
        return share * (self.gradient[place] * gap).sum(-1)


def _shares(x: Operands, band: Band, *, constant: bool) -> list[_Share]:
    """Batch rows, and heads of a row that are done together, with what they can see."""
    rows, heads = x.q.shape[:2]
    lanes = min(LANES, -(-rows * heads // workers(rows * heads)))
    return [
        (batch, (begin, min(begin + lanes, last)), part)
        for batch in range(rows)
        for (first, last), part in _narrowed(x, band, constant=constant)
        for begin in range(first, last, lanes)
    ]


def _narrowed(x: Operands, band: Band, *, constant: bool) -> list[tuple[tuple[int, int], Band]]:
    """Heads in groups, each with the part of the band in which a pair can matter to it.

    A query that sees its own position has a logit of at least ``line[zero] - B`` there,
    B = max‖q‖ · max‖k‖ with q scaled; a pair at place c has one of at most ``line[c] + B``. So the
    weight of the pair is at most ``e^(line[c] - line[zero] + 2B)``. Where that is below
    ``eps / (8 K)``, all such pairs of a query together weigh less than an eighth of the rounding
    of the output.
    """
    heads, zero = x.q.shape[1], band.zero
    whole = [((0, heads), band)]
    sees_itself = zero >= band.queries - 1 and zero <= band.keys - 1
    if not constant or x.line is None or not x.table_only or not sees_itself:
        return whole
    largest = x.q.norm(dim=-1).amax((0, 2)) * x.k.norm(dim=-1).amax((0, 2))
    limit = math.log(torch.finfo(x.line.dtype).eps / (8 * band.keys))
    kept = x.line - x.line[:, zero : zero + 1] + 2 * largest.unsqueeze(-1) >= limit
    first = kept.int().argmax(-1).tolist()
    last = (kept.shape[-1] - 1 - kept.flip(-1).int().argmax(-1)).tolist()
    groups: list[tuple[tuple[int, int], Band]] = []
    for head, (low, high) in enumerate(zip(first, last, strict=True)):
        narrow = replace(band, first=max(band.first, low), last=min(band.last, high))
        if narrow.last - narrow.first > NARROW * (band.last - band.first):
            narrow = band
        if groups and groups[-1][1] == narrow:
            groups[-1] = ((groups[-1][0][0], head + 1), narrow)
        else:
            groups.append(((head, head + 1), narrow))
    return groups
