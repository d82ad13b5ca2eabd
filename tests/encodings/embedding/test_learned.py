"""Learned positions against BERT's embeddings, and refused beyond their table."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

from posenc import Layout
from posenc.encodings.embedding.learned import Learned
from posenc.errors import LengthError


def test_equals_bert() -> None:
    config = BertConfig(vocab_size=11, hidden_size=12, max_position_embeddings=20)
    theirs = BertEmbeddings(config).eval()
    ours = Learned(dim=12, max_length=20)
    with torch.no_grad():
        ours.table.copy_(theirs.position_embeddings.weight)
        theirs.token_type_embeddings.weight.zero_()
    tokens = torch.randint(11, (2, 9))
    x = theirs.word_embeddings(tokens)
    expected = theirs(input_ids=tokens)
    torch.testing.assert_close(theirs.LayerNorm(ours(x, Layout.sequence(9))), expected)


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


def test_starts_as_bert_does() -> None:
    table = Learned(dim=100, max_length=100).table.detach()
    assert table.std().item() == pytest.approx(0.0176, rel=0.05)  # 0.02, cut at two of them
    assert table.abs().max().item() <= 0.04
    assert Learned(dim=100, max_length=9, fusion="multiply").table.mean().item() == pytest.approx(
        1.0, abs=0.01
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout.sequence(11),
        Layout.sequence(3, start=8),
        Layout.sequence(2, start=-1),
        Layout.at(torch.tensor([0.0, 9.5])),
    ],
)
def test_beyond_the_table_it_refuses(layout: Layout) -> None:
    """Never a silent clamp; the message names the methods that stretch a table."""
    with pytest.raises(LengthError, match=r"0 to 9.*interpolate"):
        Learned(dim=4, max_length=10)(torch.zeros(1, layout.length, 4), layout)


def test_padding_may_stand_anywhere() -> None:
    layout = Layout.padded([10, 2], side="left")
    out = Learned(dim=4, max_length=10)(torch.zeros(2, 10, 4), layout)
    torch.testing.assert_close(out[1, 8:], out[0, :2])
