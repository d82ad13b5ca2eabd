"""One tile of logits at a time: queries of one block against a stretch of keys, forward and back.

A tile lives in memory with a pitch: element (r, j) of a tile of R queries and C keys is at
``r · pitch + j``. Read with rows of ``pitch - 1`` instead, element (r, c) is the same memory as
(r, j = c - r). So a product of queries with the vectors of all R + C - 1 offsets, written in that
second reading, lands shifted row by row where it belongs, and a sum over r in it is a sum along
diagonals; no element is moved. The second reading also sees the gap between rows, which therefore
has to be zero wherever the tile is summed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.plan import Band, Kind, Stretch
from posenc.attention.backends.tiled.stock import Partial

__all__ = ["Dropout", "Pitched", "Tiles"]

PIECE = 128
"""Keys at a time whose own vectors are multiplied with those of offsets: each meets as many offsets
as there are queries, but a product of many keys computes all that any of them meets."""


class Pitched:
    """Memory for one tile a head, read in its two ways; anything may be in it at first."""

    def __init__(self, heads: int, rows: int, columns: int, *, like: Tensor) -> None:
        self.pitch = rows + columns
        self.memory = like.new_empty(heads, (rows + 1) * self.pitch)
        self.shape = (rows, columns)

    def tile(self, rows: int, columns: int) -> Float[Tensor, "H R C"]:
        """Element (r, j)."""
        step = self.memory.stride(0)
        return self.memory.as_strided((self.memory.shape[0], rows, columns), (step, self.pitch, 1))

    def skewed(self, rows: int, columns: int) -> Float[Tensor, "H R R+C-1"]:
        """Element (r, r + j)."""
        size = (self.memory.shape[0], rows, rows + columns - 1)
        return self.memory.as_strided(size, (self.memory.stride(0), self.pitch - 1, 1))

    def turned(self, rows: int, columns: int) -> Float[Tensor, "H R C"]:
        """Element (r, j) of a tile whose skewed reading has a row for each j: at (j, r + j)."""
        size = (self.memory.shape[0], rows, columns)
        return self.memory.as_strided(size, (self.memory.stride(0), 1, self.pitch + 1))

    def full(self, rows: int, columns: int) -> Float[Tensor, "H R C"]:
        """Rows of the whole pitch."""
        size = (self.memory.shape[0], rows, columns)
        return self.memory.as_strided(size, (self.memory.stride(0), self.pitch, 1))

    def clear(self) -> None:
        """Set all to zero."""
        self.memory.zero_()

    def clear_gap(self, rows: int, columns: int) -> None:
        """Set all that is no element of the tile to zero."""
        size = (self.memory.shape[0], rows, self.pitch - columns)
        gap = self.memory.as_strided(size, (self.memory.stride(0), self.pitch, 1), columns)
        gap.zero_()


class Dropout:
    """Which weights are dropped: the same in both directions, since each tile has its own seed."""

    def __init__(self, probability: float, seed: int) -> None:
        self.probability, self.seed = probability, seed

    def factors(self, like: Tensor, *place: int) -> Tensor:
        """0 for dropped weights, 1 / (1 - probability) for others, in the shape of ``like``."""
        generator = torch.Generator(like.device)
        generator.manual_seed(hash((self.seed, *place)) & 0x7FFFFFFFFFFFFFFF)
        keep = torch.empty_like(like, memory_format=torch.contiguous_format)
        return keep.bernoulli_(1 - self.probability, generator=generator).div_(1 - self.probability)


class Tiles:
    """The tiles of some heads of one batch row.

    Where there are left terms the line is one more of their features, which saves a pass over each
    tile.

    Args:
        x: operands of one batch row.
        band: which pairs are visible.
        line: of offsets, with -inf where the band hides pairs; None: nothing.
        size: queries and keys of the largest tile.
        dropout: of weights; None: none.
        lane: a number that tells these heads from others, for the dropout.
    """

    def __init__(
        self,
        x: Operands,
        band: Band,
        line: Float[Tensor, "h W"] | None,
        size: tuple[int, int],
        dropout: Dropout | None,
        lane: int,
    ) -> None:
        self.x, self.line, self.dropout, self.lane = x, line, dropout, lane
        self.size = (min(size[0], band.queries), min(size[1], band.keys))
        self.q, self.k, self.v = x.q[0], x.k[0], x.v[0]
        heads = self.q.shape[0]
        self.scores = Pitched(heads, *self.size, like=self.q)
        self.left = self.left_rows = None
        if x.left is not None and x.left_rows is not None:
            self.left, self.left_rows = x.left[0], x.left_rows
            if line is not None:
                self.left = _with_ones(self.left)
                rows = self.left_rows.expand(heads, -1, -1)
                self.left_rows = _with_column(rows, line.expand(heads, -1))
        self.queries, self.keys = self.q, self.k
        self.values = _with_ones(self.v) if dropout is None else self.v
        if x.right is not None:
            self.side = Pitched(heads, min(PIECE, self.size[1]), self.size[0], like=self.q)

    def chunks(self, stretch: Stretch) -> list[tuple[int, int]]:
        """A stretch of keys as ranges of the size of a tile."""
        starts = range(stretch.begin, stretch.end, self.size[1])
        return [(start, min(start + self.size[1], stretch.end)) for start in starts]

    def forward(self, begin: int, end: int, stretches: list[Stretch]) -> Partial:
        """Attention of queries ``begin`` to ``end`` over these stretches."""
        heads, rows, width = self.q.shape[0], end - begin, self.v.shape[-1]
        output = self.q.new_zeros(heads, rows, width + 1)  # and the sum of the weights
        highest = self.q.new_full((heads, rows, 1), -torch.inf)
        for stretch in stretches:
            for low, high in self.chunks(stretch):
                weights = self.logits(begin, end, low, high, stretch.kind)
                above = torch.maximum(highest, weights.amax(-1, keepdim=True))
                finite = above.masked_fill(above == -torch.inf, 0.0)
                weights.sub_(finite).exp_()
                output.mul_((highest - finite).exp_())
                highest = above
                if self.dropout is not None:
                    output[..., width:] += weights.sum(-1, keepdim=True)
                    weights.mul_(self.dropout.factors(weights, self.lane, begin, low))
                values = self._values(low, high, stretch.kind)
                output[..., : values.shape[-1]].baddbmm_(weights, values)
                if self.x.value_rows is not None and stretch.kind == "near":
                    self.scores.clear_gap(rows, high - low)
                    skewed = self.scores.skewed(rows, high - low)
                    vectors = self._window(self.x.value_rows, begin, end, low, high)
                    output[..., :width].baddbmm_(skewed, vectors.expand(heads, -1, -1))
        sums = output[..., width:]
        total = (highest + sums.log()).squeeze(-1)
        output = output[..., :width] / sums.masked_fill(sums == 0, 1.0)
        return Partial(output.unsqueeze(0), total.unsqueeze(0))

    def bias(self, begin: int, end: int, low: int, high: int) -> Float[Tensor, "H R C"] | None:
        """What is added to the products in a tile of many offsets, in the scores' memory.

        None where it is nothing but a line of offsets, if anything.
        """
        x, rows, columns = self.x, end - begin, high - low
        tile = self.scores.tile(rows, columns)
        if self.left is None and x.right is None and x.column is None:
            return None
        if self.left is not None and self.left_rows is not None:
            vectors = self._window(self.left_rows, begin, end, low, high).mT
            _products(self.scores.skewed(rows, columns), self.left[:, begin:end], vectors)
        elif self.line is not None:
            tile.copy_(self._hankel(begin, end, low, high))
        else:
            tile.zero_()
        if x.right is not None and x.right_rows is not None:
            for at, to in _pieces(low, high):
                vectors = self._window(x.right_rows, begin, end, at, to).mT
                side = self.side.full(to - at, rows + to - at - 1)
                _products(side, x.right[0, :, at:to], vectors)
                tile[..., at - low : to - low].add_(self.side.turned(rows, to - at))
        if x.column is not None:
            tile.add_(x.column[0, :, low:high].unsqueeze(-2))
        return tile

    def logits(
        self, begin: int, end: int, low: int, high: int, kind: Kind
    ) -> Float[Tensor, "H R C"]:
        """Logits of one tile, in memory that the next call writes over."""
        tile = self.scores.tile(end - begin, high - low)
        start: Tensor | None
        if kind == "near":
            start = self.bias(begin, end, low, high)
            if start is None and self.line is not None:
                start = self._hankel(begin, end, low, high)
        else:
            start = tile.copy_(self.x.far_query(kind, begin, end)[0].unsqueeze(-1))
            key = self.x.far_key(kind, low, high)
            if key is not None:
                tile.add_(key[0].unsqueeze(-2))
        _products(tile, self.queries[:, begin:end], self.keys[:, low:high].mT, start=start)
        return tile

    def _values(self, low: int, high: int, kind: Kind) -> Float[Tensor, "H C E"]:
        values, far = self.values[:, low:high], None
        if kind != "near":
            far = self.x.far_value(kind)
        if far is None:
            return values
        missing = values.shape[-1] - far.shape[-1]
        return values + torch.nn.functional.pad(far, (0, missing))

    def _hankel(self, begin: int, end: int, low: int, high: int) -> Float[Tensor, "H R C"]:
        assert self.line is not None
        line, heads = self.line, self.q.shape[0]
        step = 0 if line.shape[0] == 1 else line.stride(0)
        offset = line.storage_offset() + begin + low
        return line.as_strided((heads, end - begin, high - low), (step, 1, 1), offset)

    @staticmethod
    def _window(rows: Tensor, begin: int, end: int, low: int, high: int) -> Tensor:
        """The vectors of all offsets in a tile, ``[h, R + C - 1, F]``."""
        return rows[:, begin + low : end - 1 + high]


def _products(
    out: Float[Tensor, "H R C"],
    left: Float[Tensor, "H R D"],
    right: Float[Tensor, "h D C"],
    *,
    start: Float[Tensor, "H R C"] | None = None,
) -> None:
    """``out = start + left @ right``; ``start`` may be ``out`` itself."""
    if start is not None and start is not out:
        out.copy_(start)
    out.baddbmm_(left, right.expand(len(out), -1, -1), beta=0.0 if start is None else 1.0)


def _pieces(low: int, high: int) -> Iterator[tuple[int, int]]:
    for at in range(low, high, PIECE):
        yield at, min(at + PIECE, high)


def _with_ones(x: Float[Tensor, "H L D"]) -> Float[Tensor, "H L D+1"]:
    return torch.nn.functional.pad(x, (0, 1), value=1.0)


def _with_column(x: Float[Tensor, "H L D"], column: Tensor) -> Float[Tensor, "H L D+1"]:
    return torch.cat([x, column.unsqueeze(-1)], dim=-1)


class BackwardTiles(Tiles):
    """The tiles once more, for the gradients of everything they were made from.

    Args:
        whole: output and total over all keys; of one batch row, as x.
        gradient: of the output.
        into: where gradients are summed up.
    """

    def __init__(
        self,
        x: Operands,
        band: Band,
        line: Float[Tensor, "h W"] | None,
        size: tuple[int, int],
        dropout: Dropout | None,
        lane: int,
        *,
        whole: Partial,
        gradient: Float[Tensor, "B H Q E"],
        into: Operands,
    ) -> None:
        super().__init__(x, band, line, size, dropout, lane)
        total = whole.total[0].masked_fill(whole.total[0] == -torch.inf, torch.inf)
        self.queries = _with_column(self.queries, -total)
        self.keys = _with_ones(self.keys)
        self.gradient = gradient[0]
        self.inner = (gradient[0] * whole.output[0]).sum(-1)
        # The sum that is taken from every gradient of a weight, as one more feature.
        self.gradients = self.gradient
        if dropout is None:
            self.gradients = _with_column(self.gradient, -self.inner)
        self.into = into
        heads = self.q.shape[0]
        self.slopes = Pitched(heads, *self.size, like=self.q)
        self.last: tuple[int, int] | None = None
        if x.right is not None:
            self.slope_side = Pitched(heads, min(PIECE, self.size[1]), self.size[0], like=self.q)

    def backward(
        self, begin: int, end: int, stretches: list[Stretch], *, sums: bool
    ) -> Float[Tensor, "H R"]:
        """Sum the gradients through these stretches; the sum of the logits' gradients a query.

        Args:
            sums: whether that is wanted; it is zero otherwise.
        """
        total = self.q.new_zeros(self.q.shape[0], end - begin)
        for stretch in stretches:
            for low, high in self.chunks(stretch):
                slopes = self._backward(begin, end, low, high, stretch.kind)
                if sums:
                    total += slopes.sum(-1)
        return total

    def _backward(
        self, begin: int, end: int, low: int, high: int, kind: Kind
    ) -> Float[Tensor, "H R C"]:
        """One tile; returns the gradients of its logits."""
        into, gradient = self.into, self.gradient[:, begin:end]
        weights = self.logits(begin, end, low, high, kind).exp_()
        slopes = self._slopes(begin, end, low, high, kind)
        kept = weights
        if self.dropout is not None:
            factors = self.dropout.factors(weights, self.lane, begin, low)
            slopes.mul_(factors).sub_(self.inner[:, begin:end].unsqueeze(-1))
            kept = weights * factors
        slopes.mul_(weights)
        into.v[0, :, low:high].baddbmm_(kept.mT, gradient)
        into.q[0, :, begin:end].baddbmm_(slopes, self.k[:, low:high])
        into.k[0, :, low:high].baddbmm_(slopes.mT, self.q[:, begin:end])
        if into.column is not None:
            into.column[0, :, low:high] += slopes.sum(-2)
        if kind == "near":
            self._near_terms(begin, end, low, high, kept)
        else:
            self._far_terms(begin, end, low, high, kind, kept)
        return slopes

    def _slopes(
        self, begin: int, end: int, low: int, high: int, kind: Kind
    ) -> Float[Tensor, "H R C"]:
        """Gradients of the weights, before dropout."""
        rows, columns = end - begin, high - low
        if self.last != (rows, columns):
            self.slopes.clear()
            if self.x.right is not None:
                self.slope_side.clear()
            self.last = (rows, columns)
        tile, start = self.slopes.tile(rows, columns), None
        if kind == "near" and self.x.value_rows is not None:
            vectors = self._window(self.x.value_rows, begin, end, low, high).mT
            _products(self.slopes.skewed(rows, columns), self.gradient[:, begin:end], vectors)
            self.slopes.clear_gap(rows, columns)
            start = tile
        values = self._values(low, high, kind).mT
        _products(tile, self.gradients[:, begin:end], values, start=start)
        return tile

    def _near_terms(self, begin: int, end: int, low: int, high: int, kept: Tensor) -> None:
        """Gradients of what depends on the offset, in a tile of many offsets."""
        x, into = self.x, self.into
        rows, columns = end - begin, high - low
        window = slice(begin + low, end - 1 + high)
        skewed = self.slopes.skewed(rows, columns)
        if into.line is not None:
            into.line[:, window] += skewed.sum(1)
        if x.left is not None and x.left_rows is not None and into.left is not None:
            assert into.left_rows is not None
            left = x.left[0, :, begin:end]
            vectors = x.left_rows[:, window].expand(len(left), -1, -1)
            into.left[0, :, begin:end].baddbmm_(skewed, vectors)
            _sum_heads(into.left_rows[:, window], skewed.mT @ left)
        if x.right is not None and x.right_rows is not None and into.right is not None:
            assert into.right_rows is not None
            for at, to in _pieces(low, high):
                right, piece = x.right[0, :, at:to], slice(begin + at, end - 1 + to)
                slopes = self.slopes.tile(rows, columns)[..., at - low : to - low]
                self.slope_side.turned(rows, to - at).copy_(slopes)
                side = self.slope_side.full(to - at, rows + to - at - 1)
                vectors = x.right_rows[:, piece].expand(len(right), -1, -1)
                into.right[0, :, at:to].baddbmm_(side, vectors)
                _sum_heads(into.right_rows[:, piece], side.mT @ right)
        if into.value_rows is not None:
            if kept.data_ptr() != self.scores.memory.data_ptr():
                self.scores.tile(rows, columns).copy_(kept)
            self.scores.clear_gap(rows, columns)
            weights = self.scores.skewed(rows, columns)
            gradient = self.gradient[:, begin:end]
            _sum_heads(into.value_rows[:, window], weights.mT @ gradient)

    def _far_terms(
        self, begin: int, end: int, low: int, high: int, kind: Kind, kept: Tensor
    ) -> None:
        """Gradients of the outermost bucket of one side."""
        into, place = self.into, self.x.far_place(kind)
        slopes = self.slopes.tile(end - begin, high - low)
        far_terms(self.x, into, kind, begin, end, slopes.sum(-1).unsqueeze(0))
        if self.x.right is not None and self.x.right_rows is not None and into.right is not None:
            assert into.right_rows is not None
            sums = slopes.sum(-2).unsqueeze(-1)
            row = self.x.right_rows[:, place : place + 1]
            into.right[0, :, low:high] += sums * row
            _sum_heads(
                into.right_rows[:, place : place + 1], sums.mT @ self.x.right[0, :, low:high]
            )
        if into.value_rows is not None:
            weight = kept.sum(-1, keepdim=True)
            gradient = self.gradient[:, begin:end]
            _sum_heads(into.value_rows[:, place : place + 1], weight.mT @ gradient)


def far_terms(
    x: Operands, into: Operands, kind: Kind, begin: int, end: int, sums: Float[Tensor, "B H R"]
) -> None:
    """Gradients of the line and the left rows of one outermost bucket, from sums a query."""
    place = x.far_place(kind)
    if into.line is not None:
        into.line[:, place] += sums.sum((0, 2))
    if x.left is not None and x.left_rows is not None and into.left is not None:
        assert into.left_rows is not None
        left, row = x.left[:, :, begin:end], x.left_rows[:, place : place + 1]
        into.left[:, :, begin:end] += sums.unsqueeze(-1) * row
        products = (sums.unsqueeze(-2) @ left).sum(0)
        _sum_heads(into.left_rows[:, place : place + 1], products)


def _sum_heads(out: Float[Tensor, "h N F"], gradients: Float[Tensor, "H N F"]) -> None:
    """``out += gradients``, summed over the heads where they share their rows."""
    out += gradients.sum(0, keepdim=True) if out.shape[0] == 1 else gradients
