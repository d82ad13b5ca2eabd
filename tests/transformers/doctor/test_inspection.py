"""Layers as their code computes them: by hand, by formula and by the model's own modules."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from posenc.transformers.doctor.facts import AttentionFacts, LayerReading, RotationFacts
from posenc.transformers.doctor.inspection import inspect
from posenc.transformers.doctor.recording import FAR, TOKENS, record
from tests.transformers.doctor.layers_by_hand import BY_HAND, summary

CHEAP = (
    *("bloom", "gpt_oss", "mamba", "modernbert", "modernbert-decoder", "qwen3_next", "smollm3"),
    *("t5", pytest.param("exaone4", marks=pytest.mark.exhaustive)),
)
"""Of the models read by hand; ``make sweep-doctor`` runs all. The last has windows as ``gpt_oss``,
and layers without positions as ``smollm3``."""

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 256, "pad_token_id": 0}
BASE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def tiny(kind: str, **options: Any) -> LayerReading:
    """The reading of a small model."""
    return inspect(AutoConfig.for_model(kind, **SIZES | options))


def only(reading: LayerReading) -> AttentionFacts:
    (layers,) = reading.layers
    return layers.attention


def turned(facts: AttentionFacts) -> RotationFacts:
    assert isinstance(facts.rotation, RotationFacts)
    return facts.rotation


@pytest.mark.parametrize("family", CHEAP)
def test_default_models_are_read_as_their_code_reads(family: str) -> None:
    reading = inspect(AutoConfig.for_model(family))
    assert summary(reading) == BY_HAND[family]
    assert reading.by == "run"


@pytest.mark.parametrize(("kind", "options"), SCALED.items())
def test_frequencies_and_gain_are_those_of_the_rotary_module(
    kind: str, options: dict[str, Any]
) -> None:
    rope = {"rope_type": kind, **BASE, **options}
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=rope)
    rotary = transformers.AutoModel.from_config(config).rotary_emb
    found = turned(only(inspect(config)))
    assert found.frequencies == pytest.approx(rotary.inv_freq.tolist(), rel=1e-5)
    assert found.gain == pytest.approx(rotary.attention_scaling, rel=1e-4)
    assert (found.features, found.pairing, found.sign, found.varies) == (16, "half", 1, False)


def test_dynamic_frequencies_change_with_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, **BASE}
    assert turned(only(tiny("llama", rope_parameters=rope))).varies is True


def test_heads_of_equal_keys_are_counted_once() -> None:
    facts = only(tiny("llama"))
    assert (facts.heads, facts.key_heads, facts.head_dim, facts.value_dim) == (4, 2, 16, 16)
    assert facts.scale == 0.25


def test_caps_and_windows() -> None:
    sizes = {"head_dim": 16, "sliding_window": 32, "attn_logit_softcapping": 30.0}
    window, full = tiny("gemma2", **sizes).layers
    assert (window.attention.back, full.attention.back) == (31, None)
    assert window.attention.cap == full.attention.cap == 30
    assert (window.numbers, full.numbers) == ((0,), (1,))


def test_temperature_by_position() -> None:
    options = {"floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [0, 0], "head_dim": 16}
    facts = only(tiny("llama4_text", **options, num_local_experts=2, intermediate_size_mlp=64))
    expected = {at: math.log(math.floor((at + 1) / 4) + 1) * 0.5 + 1 for at in (*range(9), FAR)}
    assert facts.rotation is None
    assert isinstance(facts.temperature, dict)
    for at, factor in expected.items():
        assert float(facts.temperature.get(str(at), 1)) == pytest.approx(factor, rel=1e-4)


def test_tables_of_positions_and_their_first_row() -> None:
    for kind, first in (("bert", 0), ("roberta", 2)):
        reading = tiny(kind, pad_token_id=1)
        (table,) = reading.tables
        assert (table.rows, table.first) == (256, first)
        assert only(reading).absolute is True
        assert only(reading).causal is False


def test_keys_of_other_layers() -> None:
    sizes = {"head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    reading = tiny("gemma3n_text", **sizes, layer_types=["full_attention"] * 4, laurel_rank=8)
    found = [layers.attention.keys_of for layers in reading.layers]
    assert found == [None, "model.layers.1.self_attn"]


def test_biases_of_modules_that_compute_attention_themselves() -> None:
    facts = only(tiny("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]))
    assert facts.bias == "by content and position"
    sizes = {"n_head": 4, "hidden_size": 64, "n_layer": 1, "vocab_size": 64}
    bloom = only(inspect(AutoConfig.for_model("bloom", **sizes)))
    assert bloom.slopes == (0.25, 0.0625, 0.015625, 0.0039062)


def test_layers_get_equal_inputs_whatever_is_before_them() -> None:
    """Recurrent layers give equal tokens different outputs."""
    types = ["linear_attention", "full_attention"]
    recurrent, full = tiny("minimax", head_dim=16, layer_types=types, num_local_experts=2).layers
    assert recurrent.attention.instead == ("MiniMaxLightningAttention",)
    assert turned(full.attention).pairing == "half"
    assert (full.attention.absolute, full.attention.temperature) == (False, {})


def test_arguments_are_told_beside_what_the_mask_shows() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = AutoConfig.for_model("modernbert", **sizes, local_attention=16)
    _, local = inspect(config).layers
    assert (local.attention.back, local.attention.ahead) == (8, 8)
    assert local.attention.arguments["sliding_window"] == 9
    assert not {"scaling", "dropout", "is_causal"} & set(local.attention.arguments)


def test_nothing_of_the_caller_changes() -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    state, before = torch.get_rng_state(), config.to_json_string()
    inspect(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_json_string() == before
    assert config._attn_implementation != "posenc-inspection"


def test_models_that_cannot_be_built_say_why() -> None:
    with pytest.raises(RuntimeError, match="full_attention"):
        inspect(AutoConfig.for_model("cohere_compass_text"))


def test_every_fact_has_a_source() -> None:
    sources = only(tiny("llama")).sources
    names = {"absolute", "heads", "causal", "bias", "temperature", "rotation", "sinks", "cap"}
    assert names <= set(sources)
    assert sources["causal"] == "mask function"


# Calls of attention in modules that use none of transformers' interfaces


class OwnAttention(nn.Module):
    """Softmax of products written out, or PyTorch's function."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.query(x), self.key(x), x))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.mT / 2).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)


class Shared(nn.Module):
    """A model that calls one module twice, and softmax elsewhere too."""

    main_input_name, dtype = "input_ids", torch.float32
    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 8), nn.Embedding(20, 8)
        self.attention = OwnAttention(fused=fused)

    def forward(self, input_ids: Tensor, use_cache: Any = None) -> Tensor:
        at = torch.arange(2, 2 + input_ids.shape[1])
        x = self.words(input_ids) + self.positions(at)
        for _ in range(2):
            x = x + self.attention(x) * x.softmax(-1)
        return x


def test_own_products_and_softmax_are_a_call() -> None:
    model = Shared(fused=False).eval()
    recorder = record(model, {})
    first, second = recorder.calls
    assert first.module is second.module is model.attention
    assert first.query.shape == (1, 2, TOKENS, 4)
    expected = first.query[0] @ first.key[0].mT / 2
    torch.testing.assert_close(first.logits, expected)
    assert recorder.tables == {model.positions: (20, 2)}


def test_calls_of_the_fused_function() -> None:
    model = Shared(fused=True).eval()
    calls = record(model, {}).calls
    assert [call.module for call in calls] == [model.attention] * 2
    assert calls[0].options["is_causal"] is True
    assert calls[0].logits is None


def test_silent_products_leave_bias_and_mask() -> None:
    calls = record(Shared(fused=False).eval(), {}, silent=True).calls
    assert [bool(call.logits.any()) for call in calls if call.logits is not None] == [False] * 2
