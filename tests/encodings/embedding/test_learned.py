"""Learned positions against BERT's embeddings, and refused beyond their table."""

from __future__ import annotations

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.learned import Learned


@pytest.mark.parametrize("fusion", ["add", "multiply"])
def test_equals_loops(fusion: str) -> None:
    encoding = Learned(dim=3, max_length=10, fusion=fusion).requires_grad_(False)  # type: ignore[arg-type]
    positions = torch.tensor([[0.0, 4.0, 9.0], [2.5, 1.0, 8.25]])
    x = torch.randn(2, 3, 3)
    got = encoding(x, Layout.at(positions))
    for b in range(2):
        for i in range(3):
            position = positions[b, i].item()
            low = int(position)
            share = position - low
            row = (1 - share) * encoding.table[low] + share * encoding.table[min(low + 1, 9)]
            expected = x[b, i] + row if fusion == "add" else x[b, i] * row
            torch.testing.assert_close(got[b, i], expected)


def test_padding_may_stand_anywhere() -> None:
    layout = Layout.padded([10, 2], side="left")
    out = Learned(dim=4, max_length=10)(torch.zeros(2, 10, 4), layout)
    torch.testing.assert_close(out[1, 8:], out[0, :2])
