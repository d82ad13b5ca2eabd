"""The compiled kernels' terms between the cells of images, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import posenc
from posenc.attention import attend, explain
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


def test_special_tokens_and_masks_are_left_alone() -> None:
    encoding = posenc.create("irpe", heads=4, head_dim=24)
    seen = torch.arange(48).view(1, 6, 8) < 40
    for layout in (Layout.image(6, 8, prefix=1), Layout.image(6, 8, prefix=1, valid=seen)):
        q, k, v = draw(layout.length, layout.length)
        with pytest.raises(BackendRefusal, match="whole stretches"):
            attend(q, k, v, Grid.of(layout), encoding, backend="native")
