"""Biases that are linear in the distance, divided in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from posenc.errors import ArgumentError
from posenc.extension import NotApplicable
from posenc.transformers import restore, stretch
from posenc.transformers.acceleration import accelerate
from tests.transformers.acceleration.case import of
from tests.transformers.acceleration.cases.texts import MPT

FACTOR = 2.5
IDS = torch.randint(10, 90, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 100, "hidden_size": 32}


ALIBI = {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
ALIBI |= {"new_decoder_architecture": False}
MODELS = {
    "bloom": of("BloomForCausalLM", SIZES, n_layer=2, n_head=4),
    **{
        f"falcon-{name}": of("FalconForCausalLM", SIZES | ALIBI, attn_implementation=name)
        for name in ("sdpa", "eager")
    },
    "mpt": of("MptForCausalLM", MPT, vocab_size=100, d_model=32, n_heads=4, max_seq_len=16),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # so that attention attends
    return model


def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the slopes in the code of transformers."""
    of_bloom = "_get_alibi_slopes"
    if not hasattr(modeling_bloom, of_bloom):  # before 5.23
        of_bloom = "build_alibi_tensor"
    for module, name in (
        (modeling_bloom, of_bloom),
        (modeling_falcon, "build_alibi_tensor"),
        (modeling_mpt, "build_mpt_alibi_tensor"),
    ):
        made = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, made=made, **named: made(*a, **named) / FACTOR)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_slopes_are_divided_and_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(name), IDS[:, :16]
    plain = model(ids).logits
    report = stretch(model, "interpolate", factor=FACTOR)
    assert report.place == "biases"
    assert report.stretched == 2
    assert "divided by 2.5" in str(report)
    stretched = model(ids).logits
    assert not torch.allclose(stretched, plain, atol=1e-3)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    padded = model(ids, attention_mask=padding).logits[:, 3:]
    with monkeypatch.context() as patched:
        divided(patched)
        other = made(name)
        torch.testing.assert_close(stretched, other(ids).logits, rtol=0, atol=1e-4)
        expected = other(ids, attention_mask=padding).logits[:, 3:]
        torch.testing.assert_close(padded, expected, rtol=0, atol=1e-4)
    restore(model)
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_it_decodes_as_it_reads_at_once_past_the_trained_length(name: str) -> None:
    model = made(name)
    stretch(model, "interpolate", factor=FACTOR)
    twin = copy.deepcopy(model)
    done = twin.generate(IDS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    whole = model(done).logits[:, -4:-1].argmax(-1)
    assert torch.equal(done[:, -3:], whole)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_config_keeps_it(name: str, tmp_path: Path) -> None:
    model = made(name)
    stretch(model, "interpolate", factor=FACTOR)
    model.save_pretrained(tmp_path)
    implementation = {"attn_implementation": model.config._attn_implementation}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **implementation)
    stretch(loaded)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    if name == "mpt":
        assert loaded.config.max_seq_len == 40


@torch.no_grad()
def test_accelerated_after_it() -> None:
    model = made("bloom")
    stretch(model, "interpolate", factor=FACTOR)
    expected = model(IDS).logits
    accelerate(model, shortest=1)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-4)


def test_what_no_method_stretches_is_named() -> None:
    model = made("bloom")
    with pytest.raises(NotApplicable, match="rope"):
        stretch(model, "yarn", factor=2, length=16)
    with pytest.raises(ArgumentError, match="one that divides slopes"):
        stretch(model, "log_n", factor=2, length=16)
    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2}
    t5 = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, num_heads=2))
    before = t5.state_dict()
    with pytest.raises(ArgumentError, match="a learned position_bias of T5LayerSelfAttention"):
        stretch(t5, "interpolate", factor=2)
    assert not any(module._forward_pre_hooks for module in t5.modules())
    assert t5.state_dict().keys() == before.keys()
