"""T5 of transformers, read: the same numbers and the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from posenc import Layout
from posenc.integrations.transformers import load
from posenc.models import Encoder, Transformer, generate

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}

CASES: dict[str, dict[str, Any]] = {
    "first": SIZES,
    "second": SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "silu": SIZES | {"feed_forward_proj": "gated-silu"},
}


def make(case: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**CASES[case]))
    if case == "second":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    return model.eval()


def tokens(rows: int = 2, length: int = 17) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_read_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, Transformer)
    assert ours.config.tied == (case != "second")
    source, target = tokens(), tokens(length=9).flip(1)
    close(ours(source, target), theirs(input_ids=source, decoder_input_ids=target).logits)
    expected = theirs.generate(source, max_new_tokens=12, do_sample=False, decoder_start_token_id=0)
    begin = torch.zeros(2, 1, dtype=torch.int64)
    assert torch.equal(generate(ours.given(source), begin, max_new_tokens=12), expected)


@torch.no_grad()
def test_padded_sources_equal_transformers(tmp_path: Path) -> None:
    theirs = make("first")
    theirs.save_pretrained(tmp_path)
    source, target, mask = tokens(), tokens(length=9), torch.ones(2, 17, dtype=torch.int64)
    mask[1, 11:] = 0
    expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    close(load(tmp_path)(source, target, Layout.padded([17, 11])), expected)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_encoder_alone_equals_transformers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.T5EncoderModel(transformers.T5Config(**CASES[case])).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, Encoder)
    source = tokens()
    close(ours(source), theirs(source).last_hidden_state)
    mask = torch.ones_like(source)
    mask[1, 11:] = 0
    expected = theirs(source, attention_mask=mask).last_hidden_state[1, :11]
    close(ours(source, Layout.padded([17, 11]))[1, :11], expected)
