"""Learned cells of an image against ViT's embeddings, and refused beyond their table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc import Layout
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.errors import LengthError


def made(**options: Any) -> Learned2d:
    arguments: dict[str, Any] = {"dim": 3, "size": (4, 6)} | options
    return Learned2d(**arguments)


def table(encoding: Learned2d, layout: Layout) -> Tensor:
    embedded: Tensor = encoding(torch.zeros(layout.batch, layout.length, 3), layout)
    return embedded


def test_equals_loops() -> None:
    """Bilinear between cells, rows of the batch at different positions, the last cell itself."""
    encoding = made().requires_grad_(False)
    positions = torch.tensor([[[0.0, 5.0], [3.0, 0.25]], [[2.5, 4.75], [3.0, 5.0]]])
    got = table(encoding, Layout.at(positions))
    for b in range(2):
        for i in range(2):
            y, x = positions[b, i].tolist()
            expected = torch.zeros(3)
            for row in range(4):
                for column in range(6):
                    share = max(0.0, 1 - abs(y - row)) * max(0.0, 1 - abs(x - column))
                    expected += share * encoding.table[row, column]
            torch.testing.assert_close(got[b, i], expected)


def test_a_worked_cell() -> None:
    encoding = made(size=(2, 2), dim=3)
    nn.init.zeros_(encoding.table)
    with torch.no_grad():
        encoding.table[0, 1], encoding.table[1, 1] = 8.0, 16.0
    between = table(encoding, Layout.at(torch.tensor([[[0.25, 0.5]]])))
    assert between.flatten().tolist() == [5.0, 5.0, 5.0]  # half of 8 + (16 - 8) / 4


def test_smaller_images_read_the_upper_left() -> None:
    encoding = made()
    got = table(encoding, Layout.image(2, 5, prefix=1))
    torch.testing.assert_close(got[0, 1:].view(2, 5, 3), encoding.table[:2, :5])
    cells = Layout.at(Layout.image(2, 5).positions)
    torch.testing.assert_close(table(encoding, cells), got[:, 1:])


def test_special_tokens_have_rows_of_their_own() -> None:
    """In front, none, or anywhere in a row, different in each row of the batch."""
    encoding = made(special=2)
    got = table(encoding, Layout.image(1, 2, prefix=2))
    torch.testing.assert_close(got[0], torch.cat([encoding.special, encoding.table[0, :2]]))
    torch.testing.assert_close(table(encoding, Layout.image(1, 2)), encoding.table[:1, :2])
    special = torch.tensor([[False, True, True], [True, False, True]])
    layout = Layout(torch.ones(1, 3, 2), torch.arange(3)[None], special=special)
    first, second = encoding.special
    cell = encoding.table[1, 1]
    expected = torch.stack([torch.stack([cell, first, second]), torch.stack([first, cell, second])])
    torch.testing.assert_close(table(encoding, layout), expected)


def test_padding_may_stand_anywhere() -> None:
    """The frame may be larger than the table, as long as what is real is inside."""
    valid = torch.zeros(1, 9, 9, dtype=torch.bool)
    valid[:, :2, :3] = True
    encoding = made()
    got = table(encoding, Layout.image(9, 9, valid=valid)).view(9, 9, 3)
    torch.testing.assert_close(got[:2, :3], encoding.table[:2, :3])
    valid[:, 4] = True
    with pytest.raises(LengthError, match="rows"):
        table(encoding, Layout.image(9, 9, valid=valid))
