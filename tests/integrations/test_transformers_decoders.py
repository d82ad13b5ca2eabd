"""Decoders of transformers, read and written: the same numbers and the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from posenc import Layout
from posenc.integrations.transformers import load, save
from posenc.models import Decoder, DecoderConfig, generate

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama grouped": ("Llama", SIZES | {"num_key_value_heads": 2, "head_dim": 12}),
    "llama tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "llama biases": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama base": (
        "Llama",
        SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "mistral": ("Mistral", SIZES | {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral whole": ("Mistral", SIZES | {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES | {"num_key_value_heads": 2}),
    "qwen2 windows": (
        "Qwen2",
        SIZES
        | {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "gpt_neox": ("GPTNeoX", SIZES),
    "gpt_neox serial": (
        "GPTNeoX",
        SIZES
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "bloom": ("Bloom", BLOOM | {"n_head": 4}),
    "bloom odd heads": ("Bloom", BLOOM | {"hidden_size": 36, "n_head": 6}),
}


def make(case: str) -> nn.Module:
    """A model of transformers with every weight drawn anew, so that none is 0 or 1 by default."""
    kind, fields = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    config.eos_token_id = config.pad_token_id = None
    config._attn_implementation = "eager"
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(rows: int = 2, length: int = 17) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_read_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    text = tokens()
    close(ours(text), theirs(text).logits)
    expected = theirs.generate(text[:, :9], max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(ours, text[:, :9], max_new_tokens=12), expected)


@pytest.mark.parametrize("case", ["llama grouped", "gpt_neox", "bloom", "mistral"])
@torch.no_grad()
def test_padded_rows_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    theirs.save_pretrained(tmp_path)
    text, mask = tokens(), torch.ones(2, 17, dtype=torch.int64)
    mask[1, :6] = 0
    positions = {} if case == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = theirs(text, attention_mask=mask, **positions).logits
    logits = load(tmp_path)(text, Layout.padded([17, 11], side="left"))
    close(logits[0], expected[0])
    close(logits[1, 6:], expected[1, 6:])


@pytest.mark.parametrize("case", [c for c in CASES if "bloom" not in c and c != "qwen2 windows"])
@torch.no_grad()
def test_written_equals_transformers(case: str, tmp_path: Path) -> None:
    theirs, family = make(case), case.split()[0]
    theirs.save_pretrained(tmp_path / "first")
    ours = load(tmp_path / "first")
    save(ours, tmp_path / "second", family=family, shard_bytes=20_000)
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "second", attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)
    assert torch.equal(load(tmp_path / "second")(tokens()), ours(tokens()))


@torch.no_grad()
def test_a_decoder_of_ours_becomes_a_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Decoder(
        DecoderConfig(vocabulary=VOCABULARY, dim=32, layers=2, heads=4, kv_heads=2, max_length=64)
    ).eval()
    save(ours, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    assert theirs.config.max_position_embeddings == 64
    # The factor √C of the embedding is in its weights now, and not in the tied output's.
    close(theirs(tokens()).logits, ours(tokens()))
    close(load(tmp_path / "out")(tokens()), ours(tokens()))


@torch.no_grad()
def test_half_precision_is_kept_or_converted(tmp_path: Path) -> None:
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).embedding.weight.dtype == torch.float32
    half = load(tmp_path, dtype=torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16
    save(half, tmp_path / "out")
    assert '"dtype": "bfloat16"' in (tmp_path / "out" / "config.json").read_text()


def test_special_tokens_are_taken_from_another_config(tmp_path: Path) -> None:
    theirs = make("llama")
    theirs.config.eos_token_id = 7
    theirs.save_pretrained(tmp_path / "in")
    save(load(tmp_path / "in"), tmp_path / "out", like=tmp_path / "in")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 7


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(tmp_path)
    assert torch.equal(torch.rand(3), expected)
