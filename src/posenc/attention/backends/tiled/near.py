"""The gradient of an offset bias that is the only term and is constant beyond a distance.

The fused kernel finds all other gradients at once, but none of its mask. Only near its own place
does a query meet offsets of many buckets: there the gradients of the logits are computed once more,
in tiles. What is far behind and far ahead follows as in ``passes``.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled import passes
from posenc.attention.backends.tiled.band import Band, Kind
from posenc.attention.backends.tiled.gradients import BackwardTiles
from posenc.attention.backends.tiled.operands import Operands, reversed_rows
from posenc.attention.backends.tiled.passes import Saved, fused, sums_ahead
from posenc.attention.backends.tiled.tiles import Dropout

SHARE = 0.25
"""Of the keys, how many a block of queries may meet as near: their logits are computed twice."""


def serves(x: Operands, band: Band, dropout: Dropout | None) -> bool:
    """True if few keys are near, so that this is faster than tiles over all keys."""
    if not (fused(x, dropout) and x.table_only) or band.behind is None or band.ahead is None:
        return False
    return passes.TILE[0] + band.ahead - band.behind <= SHARE * band.keys


def add_bias_gradient(
    x: Operands, band: Band, saved: Saved, gradient: Float[Tensor, "1 H Q E"], into: Operands
) -> None:
    """Add the gradient of the offset bias, of some heads of one batch row.

    Args:
        saved: with the output over what is far ahead, unless all keys are behind.
        into: where it is summed.
    """
    assert into.bias_by_offset is not None
    tiles = BackwardTiles(x, x.masked_bias(band), passes.TILE, None, 0)
    far: set[Kind] = set()
    rest, ahead = (
        torch.zeros_like(into.bias_by_offset[:, 0]),
        torch.zeros_like(into.bias_by_offset[:, 0]),
    )
    for begin, end in band.blocks(passes.TILE[0]):
        some, given = saved.block(begin, end), reversed_rows(gradient, begin, end)
        block = x.block(begin, end)
        tiles.start_backward(begin, end, block, whole=some.whole, gradient=given, into=into)
        for key_range in band.key_ranges(begin, end):
            if key_range.kind != "near":
                far.add(key_range.kind)
                continue
            for low, high in tiles.chunks(key_range):
                sums = tiles.gradients_of_logits(low, high).sum(1)
                into.bias_by_offset[:, tiles.places(low, high)] += sums
                rest -= sums.sum(-1)
        if saved.ahead is not None:
            ahead += sums_ahead(some, given).sum((0, 2))
    if far == {"behind", "ahead"}:
        into.bias_by_offset[:, x.far_place("ahead")] += ahead
        rest, far = rest - ahead, {"behind"}
    for kind in far:
        into.bias_by_offset[:, x.far_place(kind)] += rest
