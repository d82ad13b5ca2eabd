"""Learned positions against loops, and against embeddings of ESM-1b and RoBERTa."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EsmConfig, RobertaConfig
from transformers.models.esm.modeling_esm import EsmEmbeddings
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

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


@pytest.mark.parametrize(
    ("config", "embeddings"), [(EsmConfig, EsmEmbeddings), (RobertaConfig, RobertaEmbeddings)]
)
def test_equals_models_that_count_from_behind_their_padding(config: Any, embeddings: Any) -> None:
    """Their first token is at ``pad_token_id + 1``; padding, at ``pad_token_id``, has zeros."""
    options = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "pad_token_id": 1}
    options |= {"max_position_embeddings": 12, "type_vocab_size": 1, "token_dropout": False}
    theirs = embeddings(config(**options)).eval().requires_grad_(False)
    tokens = torch.tensor([[3, 4, 5, 6, 7], [8, 3, 1, 1, 1]])
    layout = Layout.padded([5, 2])
    later = layout.with_positions(layout.positions + 2)
    encoding = Learned(dim=8, max_length=12)
    encoding.load_state_dict({"table": theirs.position_embeddings.weight})
    x = theirs.word_embeddings(tokens)
    got, expected = encoding(x, later), theirs(tokens)
    if config is RobertaConfig:
        got = theirs.LayerNorm(got + theirs.token_type_embeddings.weight[0])
    torch.testing.assert_close(got[layout.valid], expected[layout.valid])
