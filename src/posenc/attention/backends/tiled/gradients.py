"""Backward pass of a tile: gradients of q, k, v and of every term, T5's table included."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.band import KeyRange, Kind
from posenc.attention.backends.tiled.memory import Memory, Skewed, add_product
from posenc.attention.backends.tiled.operands import Operands
from posenc.attention.backends.tiled.sdpa_cpu import Partial
from posenc.attention.backends.tiled.tiles import Tiles, pieces, with_column, with_ones


class BackwardTiles(Tiles):
    """Backward tiles of some heads of one batch row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.flat_ds = Memory("ds", self.k)
        self.ds, self.ds_side = Skewed("ds skewed", self.k), Skewed("ds", self.k)

    def start_backward(
        self,
        begin: int,
        end: int,
        block: Operands,
        *,
        whole: Partial,
        gradient: Float[Tensor, "1 H R E"],
        into: Operands,
    ) -> None:
        """Begin the tiles of queries ``begin`` to ``end``, counted from the last one.

        Args:
            block: the operands with these queries alone.
            whole: their output and LSE over all keys; gradient: of their output.
            into: where gradients are summed up, those of these queries alone.
        """
        self.start(begin, end, block)
        self.gradient, self.into = gradient[0], into  # [H, R, E]
        # What is taken from every logit and from every gradient of a weight: one more feature.
        lse = whole.lse[0].masked_fill(whole.lse[0] == -torch.inf, torch.inf)
        self.queries = with_column(self.q, -lse)  # [H, R, D + 1]
        self.delta = (self.gradient * whole.output[0]).sum(-1)  # [H, R]
        self.gradients = self.gradient
        if self.dropout is None:
            self.gradients = with_column(self.gradient, -self.delta)

    def keys(self, low: int, high: int) -> Float[Tensor, "H C D+1"]:
        """With ones to match."""
        return with_ones(self.k[:, low:high])

    def backward(self, key_ranges: list[KeyRange], *, sums: bool) -> Float[Tensor, "H R"]:
        """Sum the gradients through these key ranges; the sum of the logits' gradients a query.

        Args:
            sums: whether that is wanted; it is zero otherwise.
        """
        ds_sum = self.q.new_zeros(self.heads, self.end - self.begin)
        for key_range in key_ranges:
            for low, high in self.chunks(key_range):
                ds = self._backward(low, high, key_range.kind)
                if sums:
                    ds_sum += ds.sum(-1)
        return ds_sum

    def gradients_of_logits(self, low: int, high: int) -> Float[Tensor, "H R R+C-1"]:
        """Those of one tile of many offsets without dropout, in rows with a place an offset."""
        weights = self.logits(low, high, "near").exp_()
        self._spread(weights, self._weight_gradients(low, high, "near"))
        return self.ds.of(*weights.shape, cleared=True)[1]

    def _backward(self, low: int, high: int, kind: Kind) -> Float[Tensor, "H R C"]:
        """One tile; returns the gradients of its logits."""
        into, gradient = self.into, self.gradient
        weights = self.logits(low, high, kind).exp_()  # [H, R, C]
        found = self._weight_gradients(low, high, kind)
        kept = weights
        if self.dropout is not None:
            factors = self.dropout.factors(weights, self.lane, self.begin, low)
            found.mul_(factors).sub_(self.delta.unsqueeze(-1))
            kept = weights * factors
        ds = self._spread(weights, found)
        add_product(into.v[0, :, low:high], kept.mT, gradient, self.product)
        add_product(into.q[0], ds, self.k[:, low:high], self.product)
        add_product(into.k[0, :, low:high], ds.mT, self.q, self.product)
        if into.column is not None:
            into.column[0, :, low:high] += ds.sum(-2)
        if kind == "near":
            self._near_terms(low, high, kept, ds)
        else:
            self._far_terms(low, high, kind, kept, ds)
        return ds

    def _weight_gradients(self, low: int, high: int, kind: Kind) -> Float[Tensor, "H R C"]:
        """Gradients of the weights, before dropout, in memory that the next call writes over."""
        size = (self.heads, self.end - self.begin, high - low)
        values = self.values(low, high, kind).mT
        if self.x.table_only:
            return torch.bmm(self.gradients, values, out=self.flat_ds.of(*size))
        beta = 0.0
        if kind == "near" and self.x.value_rows is not None:
            _, whole = self.ds.of(*size)
            vectors = self.window(self.x.value_rows, low, high)
            torch.bmm(self.gradient, vectors.mT, out=whole)
            beta = 1.0
        tile, _ = self.ds.of(*size, cleared=True)
        return tile.baddbmm_(self.gradients, values, beta=beta)

    def _spread(
        self, weights: Float[Tensor, "H R C"], ds: Float[Tensor, "H R C"]
    ) -> Float[Tensor, "H R C"]:
        """Their product, in rows with a place an offset."""
        if not self.x.table_only:
            return ds.mul_(weights)
        tile, _ = self.ds.of(*weights.shape, cleared=True)
        return torch.mul(weights, ds, out=tile)

    def _near_terms(
        self, low: int, high: int, kept: Float[Tensor, "H R C"], ds: Float[Tensor, "H R C"]
    ) -> None:
        """Gradients of what depends on the offset, in a tile of many offsets."""
        x, into, rows = self.x, self.into, self.end - self.begin
        _, whole = self.ds.of(*ds.shape, cleared=True)
        window = self.places(low, high)
        if into.bias_by_offset is not None:
            into.bias_by_offset[:, window] += whole.sum(1)
        if x.left is not None and x.left_rows is not None and into.left is not None:
            assert into.left_rows is not None
            left = x.left[0]
            vectors = self.window(x.left_rows, low, high)
            add_product(into.left[0], whole, vectors, self.product)
            self._add_rows(into.left_rows[:, window], whole, left)
        if x.right is not None and x.right_rows is not None and into.right is not None:
            assert into.right_rows is not None
            for at, to in pieces(low, high):
                side, products = self.ds_side.of(self.heads, to - at, rows, cleared=True)
                side.mT.copy_(ds[..., at - low : to - low])
                vectors = self.window(x.right_rows, at, to)
                add_product(into.right[0, :, at:to], products, vectors, self.product)
                piece = self.places(at, to)
                self._add_rows(into.right_rows[:, piece], products, x.right[0, :, at:to])
        if into.value_rows is not None:
            tile, weights = self.scores.of(self.heads, rows, high - low, cleared=True)
            if self.dropout is not None:
                tile.copy_(kept)
            self._add_rows(into.value_rows[:, window], weights, self.gradient)

    def _add_rows(
        self,
        out: Float[Tensor, "h W F"],
        places: Float[Tensor, "H N W"],
        tokens: Float[Tensor, "H N F"],
    ) -> None:
        """``out += placesᵀ @ tokens``, summed over the heads where they share their rows."""
        size = (self.heads, places.shape[-1], tokens.shape[-1])
        _sum_heads(out, torch.bmm(places.mT, tokens, out=self.product.of(*size)))

    def _far_terms(
        self,
        low: int,
        high: int,
        kind: Kind,
        kept: Float[Tensor, "H R C"],
        ds: Float[Tensor, "H R C"],
    ) -> None:
        """Gradients of the outermost bucket of one side."""
        into = self.into
        far_terms(self.x, into, kind, ds.sum(-1).unsqueeze(0))
        if self.x.right is not None and self.x.right_rows is not None and into.right is not None:
            assert into.right_rows is not None
            place = self.x.far_place(kind)
            sums = ds.sum(-2).unsqueeze(-1)
            row = self.x.right_rows[:, place : place + 1]
            into.right[0, :, low:high] += sums * row
            _sum_heads(
                into.right_rows[:, place : place + 1], sums.mT @ self.x.right[0, :, low:high]
            )
        if into.value_rows is not None:
            place = self.x.far_place(kind)
            weight = kept.sum(-1, keepdim=True)
            gradient = self.gradient
            _sum_heads(into.value_rows[:, place : place + 1], weight.mT @ gradient)


def far_terms(x: Operands, into: Operands, kind: Kind, sums: Float[Tensor, "B H R"]) -> None:
    """Gradients of the offset bias and left rows of one outermost bucket, from a block's sums."""
    if into.bias_by_offset is not None:
        into.bias_by_offset[:, x.far_place(kind)] += sums.sum((0, 2))
    if x.left is not None and x.left_rows is not None and into.left is not None:
        assert into.left_rows is not None
        place = x.far_place(kind)
        left, row = x.left, x.left_rows[:, place : place + 1]
        into.left.add_(sums.unsqueeze(-1) * row)
        products = (sums.unsqueeze(-2) @ left).sum(0)
        _sum_heads(into.left_rows[:, place : place + 1], products)


def _sum_heads(out: Float[Tensor, "h N F"], gradients: Float[Tensor, "H N F"]) -> None:
    """``out += gradients``, summed over the heads where they share their rows."""
    out += gradients.sum(0, keepdim=True) if out.shape[0] == 1 else gradients
