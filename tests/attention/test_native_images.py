"""The compiled kernels' terms between the cells of images, against the reference."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc.attention import attend, explain
from posenc.attention.problem.images import shared_buckets
from posenc.encoding import BucketedTerms, Encoding, ScoreTerm, TokenTableProduct
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from tests.attention.comparing import built, compare, draw
from tests.support.watching import LargestTensor

pytestmark = [built, pytest.mark.usefixtures("poisoned")]


def test_rows_by_axis_take_no_memory_for_each_query() -> None:
    encoding = posenc.create("decomposed2d", head_dim=2, size=(16, 16))
    inputs = draw(256, 256, width=2)
    with LargestTensor() as memory:
        output = attend(*inputs, Grid.of(Layout.image(16, 16)), encoding, backend="native")
        output.sum().backward()
    assert memory.most == inputs[0].numel()


@pytest.mark.parametrize("size", [(2, 1), (2, 63), (2, 127), (4, 85)])
def test_rows_of_an_image_end_beside_blocks_of_queries(size: tuple[int, int]) -> None:
    encoding = posenc.create("decomposed2d", head_dim=24, size=size)
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)
    count = size[0] * size[1]
    compare(draw(count, count), Grid.of(Layout.image(*size)), encoding, tolerance=1e-4)


def test_auto_takes_the_kernels_for_irpe() -> None:
    q, k, v = draw(256, 256)
    encoding = posenc.create("irpe", heads=4, head_dim=24)
    assert "image offset" in str(explain(q, k, v, Grid.of(Layout.image(16, 16)), encoding))
    masked = Layout.image(16, 16, valid=torch.arange(256).view(1, 16, 16) < 250)
    assert explain(q, k, v, Grid.of(masked), encoding).backend != "native"


def test_what_is_kept_of_special_tokens_goes_with_their_layout() -> None:
    encoding, layout = posenc.create("irpe", heads=4, head_dim=24), Layout.image(6, 8, prefix=1)
    q, k, v = draw(49, 49)
    attend(q, k, v, Grid.of(layout), encoding, backend="native")
    alive = ref(layout)
    del layout
    gc.collect()
    assert alive() is None


class Signalled(ScoreTerm):
    """A row of each offset, as far as the query's signal says."""

    axes = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.index = posenc.create("swin", window=(9, 9), heads=4).score.offsets.index
        self.rows = nn.Parameter(torch.randn(1, 289, 1))

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, scale: float) -> Tensor:
        rows = self.rows[0, :, 0][self.index(grid.offset)]
        for side, axis in ((grid.query, 2), (grid.key, 1)):
            if side.special is not None:
                rows = rows.masked_fill(side.special.unsqueeze(axis), 0.0)
        return self._signal(grid) * rows.unsqueeze(1)

    def lower(
        self, q: Tensor, k: Tensor, grid: Grid, *, scale: float
    ) -> tuple[BucketedTerms] | None:
        if grid.key.special is not None:
            return None
        return (BucketedTerms(self.index, left=TokenTableProduct(self._signal(grid), self.rows)),)

    def _signal(self, grid: Grid) -> Tensor:
        assert grid.query.signal is not None
        return grid.query.signal.mT.unsqueeze(-1)


def test_signals_of_cells_behind_special_tokens_are_those_of_the_call() -> None:
    encoding, layout = Encoding(score=Signalled()), Layout.image(6, 8, prefix=1)
    q, k, v = (x.detach() for x in draw(49, 49))
    for signal in torch.randn(2, 1, 49, 4):
        grid = Grid.of(layout.with_signal(signal))
        assert "special tokens apart" in str(explain(q, k, v, grid, encoding, backend="native"))
        got, expected = (
            attend(q, k, v, grid, encoding, backend=b) for b in ("native", "reference")
        )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_many_special_tokens_and_masks_are_left_alone() -> None:
    encoding = posenc.create("irpe", heads=4, head_dim=24)
    seen = torch.arange(48).view(1, 6, 8) < 40
    for layout in (Layout.image(6, 8, prefix=40), Layout.image(6, 8, prefix=1, valid=seen)):
        q, k, v = draw(layout.length, layout.length)
        with pytest.raises(BackendRefusal, match="whole stretches"):
            attend(q, k, v, Grid.of(layout), encoding, backend="native")


def test_groups_that_share_buckets_keep_their_own() -> None:
    """Two groups of products, neither of one axis: every pair of buckets is told apart."""
    groups = [
        BucketedTerms(lambda offset: offset[..., 0].long() + offset[..., 1].long() + 9),
        BucketedTerms(lambda offset: (offset[..., 0].long() - offset[..., 1].long()) % 5),
    ]
    grid = Grid.of(Layout.image(3, 4))
    bucket, shared = shared_buckets(groups, grid)
    offsets = torch.cartesian_prod(torch.arange(-2.0, 3.0), torch.arange(-3.0, 4.0))
    for group, buckets in zip(groups, shared, strict=True):
        assert torch.equal(buckets[bucket], group.bucket(offsets))
