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
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.plan import Band, Kind, Stretch
from posenc.attention.backends.tiled.stock import Partial, join, stock_backward, stock_forward
from posenc.attention.backends.tiled.tiles import BackwardTiles, Dropout, Tiles, far_terms

__all__ = ["Saved", "backward", "forward"]

BLOCK = 512
"""Queries a block."""

FORWARD_TILE, BACKWARD_TILE = (256, 512), (256, 256)
"""Queries and keys a tile of our own."""

LANES = 8
"""Heads at a time in tiles of our own, so that a tile of all of them stays in the cache."""


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
    ahead = None
    if keep_ahead and band.ahead is not None and band.behind is not None:
        ahead = Partial(torch.zeros_like(output), torch.full_like(total, -torch.inf))
    for heads, part in _narrowed(x, band, constant=not line and dropout is None):
        mine = x.heads(*heads)
        for begin, end in part.blocks(BLOCK):
            found = _forward_block(mine, part, begin, end, dropout, heads[0])
            place = (slice(None), slice(*heads), slice(begin, end))
            output[place], total[place] = found.whole.output, found.whole.total
            if ahead is not None and found.ahead is not None:
                ahead.output[place], ahead.total[place] = found.ahead.output, found.ahead.total
    return Saved(Partial(output, total), ahead)


def _forward_block(
    x: Operands, band: Band, begin: int, end: int, dropout: Dropout | None, lane: int
) -> Saved:
    stretches = band.stretches(begin, end)
    parts: list[Partial] = []
    own: list[Stretch] = []
    ahead = None
    for stretch in stretches:
        if not _stock_serves(x, stretch, dropout):
            own.append(stretch)
            continue
        part = _stock_part(x, band, begin, end, stretch)
        parts.append(part)
        if stretch.kind == "ahead":
            ahead = part
    if own or not parts:
        parts.append(_own_part(x, band, begin, end, own, dropout, lane))
    return Saved(join(parts), ahead)


def _own_part(
    x: Operands,
    band: Band,
    begin: int,
    end: int,
    stretches: list[Stretch],
    dropout: Dropout | None,
    lane: int,
) -> Partial:
    rows = []
    for batch in range(x.q.shape[0]):
        lanes = []
        for first in range(0, x.q.shape[1], LANES):
            mine = x.row(batch).heads(first, min(first + LANES, x.q.shape[1]))
            number = batch * x.q.shape[1] + lane + first
            # Dropped weights are known by their tile, so both directions need the same tiles.
            size = FORWARD_TILE if dropout is None else BACKWARD_TILE
            tiles = Tiles(mine, band, size, dropout, number)
            blocks = [
                tiles.forward(low, min(low + FORWARD_TILE[0], end), stretches)
                for low in range(begin, end, FORWARD_TILE[0])
            ]
            lanes.append(_concat(blocks, dim=2))
        rows.append(_concat(lanes, dim=1))
    return _concat(rows, dim=0)


def _concat(parts: list[Partial], dim: int) -> Partial:
    if len(parts) == 1:
        return parts[0]
    return Partial(
        torch.cat([p.output for p in parts], dim), torch.cat([p.total for p in parts], dim)
    )


def _stock_serves(x: Operands, stretch: Stretch, dropout: Dropout | None) -> bool:
    if x.q.device.type != "cpu" or dropout is not None or x.q.shape[-1] != x.v.shape[-1]:
        return False
    return stretch.kind != "near" or x.table_only


def _stock_part(x: Operands, band: Band, begin: int, end: int, stretch: Stretch) -> Partial:
    low, high = stretch.begin, stretch.end
    mask = _mask(x, band, begin, end, stretch)
    q, k, v = x.q[:, :, begin:end], x.k[:, :, low:high], x.v[:, :, low:high]
    part = stock_forward(q, k, v, mask)
    output, total = part.output, part.total
    if stretch.kind == "near":
        if not band.clear(begin, end, low, high):
            rows = torch.arange(begin, end, device=q.device)
            least = (band.first - rows).clamp(min=low)
            most = (band.last - rows).clamp(max=high - 1)
            total = total.masked_fill(least > most, -torch.inf)
    else:
        total = total + x.far_query(stretch.kind, begin, end)
        value = x.far_value(stretch.kind)
        output = output if value is None else output + value
    return Partial(output, total)


def _mask(x: Operands, band: Band, begin: int, end: int, stretch: Stretch) -> Tensor | None:
    """What the fused kernel adds to the logits of a stretch: always a view."""
    low, high = stretch.begin, stretch.end
    if stretch.kind != "near":
        key = x.far_key(stretch.kind, low, high)
        return None if key is None else key.unsqueeze(2).expand(-1, -1, end - begin, -1)
    if x.line is None and band.clear(begin, end, low, high):
        return None
    line = x.masked_line(band)
    size = (1, line.shape[0], end - begin, high - low)
    return line.as_strided(size, (0, line.stride(0), 1, 1), begin + low)


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
    into = x.zeros()
    if not line:
        into = into.without_line()
    for heads, part in _narrowed(x, band, constant=not line and dropout is None):
        mine = _Backward(
            x.heads(*heads),
            part,
            Saved(_slice(saved.whole, heads), saved.ahead and _slice(saved.ahead, heads)),
            gradient[:, slice(*heads)],
            into.heads(*heads),
            dropout,
            heads[0],
        )
        for begin, end in part.blocks(BLOCK):
            mine.block(begin, end)
    return into


def _slice(part: Partial, heads: tuple[int, int]) -> Partial:
    return Partial(part.output[:, slice(*heads)], part.total[:, slice(*heads)])


class _Backward:
    """The backward pass of heads that see the same band."""

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
        self.x, self.band, self.saved, self.into = x, band, saved, into
        self.gradient, self.dropout, self.lane = gradient, dropout, lane
        self.sums_wanted = into.line is not None or into.left is not None

    def block(self, begin: int, end: int) -> None:
        """Add the gradients through one block of queries."""
        stretches = self.band.stretches(begin, end)
        own = [stretch for stretch in stretches if not self._stock_serves(stretch)]
        sums = self._own(begin, end, own) if own else 0.0
        far: list[Kind] = []
        for stretch in stretches:
            if stretch not in own:
                self._stock(begin, end, stretch)
                if stretch.kind != "near":
                    far.append(stretch.kind)
        if not self.sums_wanted or not far:
            return
        if "ahead" in far and "behind" in far:
            ahead = self._sums_ahead(begin, end)
            far_terms(self.x, self.into, "ahead", begin, end, ahead)
            sums, far = sums + ahead, ["behind"]
        rest = -torch.as_tensor(sums, dtype=self.x.q.dtype, device=self.x.q.device)
        far_terms(
            self.x,
            self.into,
            far[0],
            begin,
            end,
            rest.expand(*self.x.q.shape[:2], end - begin),
        )

    def _stock_serves(self, stretch: Stretch) -> bool:
        if not _stock_serves(self.x, stretch, self.dropout):
            return False
        if stretch.kind == "near":
            return self.into.line is None
        return self.x.right is None and self.x.column is None

    def _own(self, begin: int, end: int, stretches: list[Stretch]) -> Tensor:
        rows = []
        for batch in range(self.x.q.shape[0]):
            lanes = []
            for first in range(0, self.x.q.shape[1], LANES):
                heads = (first, min(first + LANES, self.x.q.shape[1]))
                tiles = BackwardTiles(
                    self.x.row(batch).heads(*heads),
                    self.band,
                    BACKWARD_TILE,
                    self.dropout,
                    batch * self.x.q.shape[1] + self.lane + first,
                    whole=_row(_slice(self.saved.whole, heads), batch),
                    gradient=self.gradient[batch : batch + 1, slice(*heads)],
                    into=self.into.row(batch).heads(*heads),
                )
                blocks = [
                    tiles.backward(low, min(low + BACKWARD_TILE[0], end), stretches)
                    for low in range(begin, end, BACKWARD_TILE[0])
                ]
                lanes.append(torch.cat(blocks, dim=1))
            rows.append(torch.cat(lanes, dim=0))
        return torch.stack(rows)

    def _stock(self, begin: int, end: int, stretch: Stretch) -> None:
        x, into = self.x, self.into
        low, high = stretch.begin, stretch.end
        output = self.saved.whole.output[:, :, begin:end]
        total = self.saved.whole.total[:, :, begin:end]
        total = total.masked_fill(total == -torch.inf, torch.inf)
        value = None
        if stretch.kind != "near":
            total = total - x.far_query(stretch.kind, begin, end)
            value = x.far_value(stretch.kind)
            output = output if value is None else output - value
        mask = _mask(x, self.band, begin, end, stretch)
        q, k, v = stock_backward(
            self.gradient[:, :, begin:end],
            x.q[:, :, begin:end],
            x.k[:, :, low:high],
            x.v[:, :, low:high],
            Partial(output, total),
            mask,
        )
        into.q[:, :, begin:end] += q
        into.k[:, :, low:high] += k
        into.v[:, :, low:high] += v
        if into.value_rows is not None:
            place = x.far_place(stretch.kind)
            sums = v.sum((0, 2))
            into.value_rows[:, place] += sums.sum(0) if into.value_rows.shape[0] == 1 else sums

    def _sums_ahead(self, begin: int, end: int) -> Float[Tensor, "B H R"]:
        """Sum of the gradients of the logits of keys far ahead, a query."""
        assert self.saved.ahead is not None  # forward was told to keep it
        place = (slice(None), slice(None), slice(begin, end))
        whole, ahead = self.saved.whole, self.saved.ahead
        gap = ahead.output[place] - whole.output[place]
        total = whole.total[place]
        share = (ahead.total[place] - total.masked_fill(total == -torch.inf, torch.inf)).exp()
        return share * (self.gradient[place] * gap).sum(-1)


def _row(part: Partial, batch: int) -> Partial:
    return Partial(part.output[batch : batch + 1], part.total[batch : batch + 1])


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
