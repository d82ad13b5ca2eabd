"""One tile of logits at a time: queries of one block against a key range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.band import KeyRange, Kind
from posenc.attention.backends.tiled.memory import Memory, Skewed, add_product
from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.sdpa_cpu import Partial
from posenc.attention.views import strided_view

PIECE = 128
"""Keys at a time whose own vectors are multiplied with those of offsets: each meets as many offsets
as there are queries, but a product of many keys computes all that any of them meets."""


class Dropout:
    """Dropout of weights; the same in both directions, since each tile has its own seed."""

    def __init__(self, probability: float, seed: int) -> None:
        self.probability, self.seed = probability, seed

    def factors(self, like: Tensor, *place: int) -> Tensor:
        """0 for dropped weights, 1 / (1 - probability) for others, in the shape of ``like``."""
        generator = torch.Generator(like.device)
        generator.manual_seed(hash((self.seed, *place)) & 0x7FFFFFFFFFFFFFFF)
        keep = torch.empty_like(like, memory_format=torch.contiguous_format)
        return keep.bernoulli_(1 - self.probability, generator=generator).div_(1 - self.probability)


@dataclass(eq=False)
class Tiles:
    """The tiles of some heads of one batch row.

    With no term but an offset bias the logits are contiguous, so that all heads' products are one
    call; with more they are where the products with offsets are written. Where there are left terms
    the offset bias is one more of their features, which saves a pass over each tile.

    Args:
        x: operands of one batch row.
        bias_by_offset: contiguous, with -inf where the band hides pairs; None: nothing to add.
        size: queries and keys of the largest tile.
        dropout: of weights; None: none.
        lane: a number that tells these heads from others, for the dropout.
    """

    x: Operands
    bias_by_offset: Float[Tensor, "h W"] | None
    size: tuple[int, int]
    dropout: Dropout | None
    lane: int

    def __post_init__(self) -> None:
        x = self.x
        self.k, self.v, self.heads = x.k[0], x.v[0], x.k.shape[1]  # [H, K, D], [H, K, E]
        self.flat, self.product = Memory("logits", self.k), Memory("product", self.k)
        self.scores, self.side = Skewed("logits skewed", self.k), Skewed("right", self.k)

    def start(self, begin: int, end: int, block: Operands) -> None:
        """Begin the tiles of queries ``begin`` to ``end``, counted from the last one.

        Args:
            block: the operands with these queries alone.
        """
        self.begin, self.end, self.x = begin, end, block
        self.queries = self.q = block.q[0]  # [H, R, D]

    def chunks(self, key_range: KeyRange) -> list[tuple[int, int]]:
        """A key range as ranges of the size of a tile."""
        starts = range(key_range.begin, key_range.end, self.size[1])
        return [(start, min(start + self.size[1], key_range.end)) for start in starts]

    def forward(self, key_ranges: list[KeyRange]) -> Partial:
        """Attention of the block over these key_ranges."""
        heads, rows, width = self.heads, self.end - self.begin, self.v.shape[-1]
        output = self.q.new_zeros(heads, rows, width + 1)  # and the sum of the weights
        row_max = self.q.new_full((heads, rows, 1), -torch.inf)  # [H, R, 1]
        for key_range in key_ranges:
            for low, high in self.chunks(key_range):
                weights = self.logits(low, high, key_range.kind)  # [H, R, C]
                new_max = torch.maximum(row_max, weights.amax(-1, keepdim=True))
                finite = new_max.masked_fill(new_max == -torch.inf, 0.0)
                weights.sub_(finite).exp_()
                output.mul_((row_max - finite).exp_())
                row_max = new_max
                if self.dropout is not None:
                    output[..., width:] += weights.sum(-1, keepdim=True)
                    weights.mul_(self.dropout.factors(weights, self.lane, self.begin, low))
                values = self.values(low, high, key_range.kind)
                add_product(output[..., : values.shape[-1]], weights, values, self.product)
                if self.x.value_rows is not None and key_range.kind == "near":
                    _, whole = self.scores.of(heads, rows, high - low, cleared=True)
                    vectors = self.window(self.x.value_rows, low, high)
                    add_product(output[..., :width], whole, vectors, self.product)
        sums = output[..., width:]  # [H, R, 1]
        lse = (row_max + sums.log()).squeeze(-1)  # [H, R]
        output = output[..., :width] / sums.masked_fill(sums == 0, 1.0)
        return Partial(output.unsqueeze(0), lse.unsqueeze(0))

    def bias(self, low: int, high: int) -> Float[Tensor, "H R C"] | None:
        """Bias of a tile of many offsets, in the memory of the logits.

        None where an offset bias is the only term, or there is none.
        """
        x, rows, columns = self.x, self.end - self.begin, high - low
        if x.left is None and x.right is None and x.column is None:
            return None
        tile, whole = self.scores.of(self.heads, rows, columns)
        if x.left is not None and x.left_rows is not None:
            left, vectors = x.left[0], self.window(x.left_rows, low, high)
            if self.bias_by_offset is not None:
                bias_by_offset = self.bias_by_offset[:, self.places(low, high)].expand(
                    self.heads, -1
                )
                left, vectors = with_ones(left), with_column(vectors, bias_by_offset)
            torch.bmm(left, vectors.mT, out=whole)
        elif self.bias_by_offset is not None:
            tile.copy_(self.hankel(low, high))
        else:
            tile.zero_()
        if x.right is not None and x.right_rows is not None:
            for at, to in pieces(low, high):
                side, products = self.side.of(self.heads, to - at, rows)
                vectors = self.window(x.right_rows, at, to)
                torch.bmm(x.right[0, :, at:to], vectors.mT, out=products)
                tile[..., at - low : to - low].add_(side.mT)
        if x.column is not None:
            tile.add_(x.column[0, :, low:high].unsqueeze(-2))
        return tile

    def logits(self, low: int, high: int, kind: Kind) -> Float[Tensor, "H R C"]:
        """Logits of one tile, in memory that the next call writes over."""
        size = (self.heads, self.end - self.begin, high - low)
        tile = self.flat.of(*size) if self.x.table_only else self.scores.of(*size)[0]
        start: Tensor | None
        if kind == "near":
            start = self.bias(low, high)
            if start is None and self.bias_by_offset is not None:
                start = self.hankel(low, high)
        else:
            start = self.x.far_query(kind)[0].unsqueeze(-1)
            key = self.x.far_key(kind, low, high)
            if key is not None:
                start = start + key[0].unsqueeze(-2)
        if start is not None and start is not tile:
            tile.copy_(start)
        beta = 0.0 if start is None else 1.0
        return tile.baddbmm_(self.queries, self.keys(low, high).mT, beta=beta)

    def keys(self, low: int, high: int) -> Float[Tensor, "H C N"]:
        """Keys of a tile, as they are multiplied with the queries."""
        return self.k[:, low:high]

    def hankel(self, low: int, high: int) -> Float[Tensor, "H R C"]:
        """The offset bias, read by a tile."""
        assert self.bias_by_offset is not None
        size = (self.heads, self.end - self.begin, high - low)
        step = 0 if self.bias_by_offset.shape[0] == 1 else self.bias_by_offset.shape[1]
        return strided_view(self.bias_by_offset, size, (step, 1, 1), self.begin + low)

    def places(self, low: int, high: int) -> slice:
        """Those of all offsets in a tile."""
        return slice(self.begin + low, self.end - 1 + high)

    def window(
        self, rows: Float[Tensor, "h W F"], low: int, high: int
    ) -> Float[Tensor, "H R+C-1 F"]:
        """The vectors of all offsets in a tile."""
        return rows[:, self.places(low, high)].expand(self.heads, -1, -1)

    def values(self, low: int, high: int, kind: Kind) -> Float[Tensor, "H C N"]:
        """Values of a tile, with a feature of ones unless there is dropout."""
        values, far = self.v[:, low:high], None
        if kind != "near":
            far = self.x.far_value(kind)
        if far is not None:
            values = values + far
        return with_ones(values) if self.dropout is None else values


def pieces(low: int, high: int) -> Iterator[tuple[int, int]]:
    """A range of keys as ranges of ``PIECE``."""
    for at in range(low, high, PIECE):
        yield at, min(at + PIECE, high)


def with_ones(x: Float[Tensor, "H L D"]) -> Float[Tensor, "H L D+1"]:
    """One more feature, which is 1."""
    return torch.nn.functional.pad(x, (0, 1), value=1.0)


def with_column(x: Float[Tensor, "H L D"], column: Tensor) -> Float[Tensor, "H L D+1"]:
    """One more feature."""
    return torch.cat([x, column.unsqueeze(-1)], dim=-1)
