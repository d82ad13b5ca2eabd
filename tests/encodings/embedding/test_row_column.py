"""Row and column tables against DETR's learned embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.detr.modeling_detr import DetrLearnedPositionEmbedding

from posenc import Layout
from posenc.encodings.embedding.row_column import RowColumn


def table(encoding: RowColumn, layout: Layout) -> Tensor:
    width = 2 * encoding.rows.shape[1]
    embedded: Tensor = encoding(torch.zeros(layout.batch, layout.length, width), layout)
    return embedded


@pytest.mark.parametrize(("height", "width"), [(3, 5), (1, 50), (50, 1), (1, 1)])
def test_equals_detr(height: int, width: int) -> None:
    theirs = DetrLearnedPositionEmbedding(4)  # type: ignore[no-untyped-call]
    ours = RowColumn(dim=8)
    with torch.no_grad():
        ours.rows.copy_(theirs.row_embeddings.weight)
        ours.columns.copy_(theirs.column_embeddings.weight)
    shape = torch.Size([1, 3, height, width])
    expected = theirs(shape, torch.device("cpu"), torch.float32).flatten(2).mT
    got = table(ours, Layout.image(height, width))
    torch.testing.assert_close(got, expected)
    weights = [theirs.row_embeddings.weight, theirs.column_embeddings.weight]
    wanted = torch.autograd.grad(expected.sin().sum(), weights)
    found = torch.autograd.grad(got.sin().sum(), [ours.rows, ours.columns])
    torch.testing.assert_close(found, wanted)


def test_what_is_read_follows_the_weights() -> None:
    """A bug others had: a table cached by shape alone keeps serving the weights of before."""
    encoding, layout = RowColumn(dim=2), Layout.image(2, 2)
    before = table(encoding, layout).detach()
    with torch.no_grad():
        encoding.rows.add_(1.0)
    torch.testing.assert_close(table(encoding, layout) - before, torch.tensor([[[0.0, 1.0]] * 4]))
    for _ in range(2):
        torch.autograd.grad(table(encoding, layout).sum(), [encoding.rows, encoding.columns])


def test_columns_come_first_worked_by_hand() -> None:
    encoding = RowColumn(dim=2, size=(2, 3))
    with torch.no_grad():
        encoding.rows.copy_(torch.tensor([[10.0], [20.0]]))
        encoding.columns.copy_(torch.tensor([[1.0], [2.0], [4.0]]))
    image = table(encoding, Layout.image(2, 3, prefix=1))[0].tolist()
    assert image == [[0, 0], [1, 10], [2, 10], [4, 10], [1, 20], [2, 20], [4, 20]]
    between = table(encoding, Layout.at(torch.tensor([[[0.25, 1.5]], [[1.0, 2.0]]])))
    assert between.tolist() == [[[3.0, 12.5]], [[4.0, 20.0]]]
