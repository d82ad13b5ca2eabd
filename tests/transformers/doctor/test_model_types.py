"""Model types whose layers, tables or inputs are unlike those of most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from posenc.lab.doctor.words import descriptions, titles
from posenc.transformers.checkpoints import Fields
from posenc.transformers.doctor.advice import advise, limits
from posenc.transformers.doctor.config_findings import disagreements
from posenc.transformers.doctor.expanded_weights import LARGE
from posenc.transformers.doctor.facts import LayerReading, RotationFacts
from posenc.transformers.doctor.inspection import inspect
from posenc.transformers.engines.config import completed
from tests.support.tiny_models import tiny_config
from tests.support.versions import needs_model_type
from tests.transformers.doctor.test_inspection import SIZES, only, tiny

DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 = DEBERTA | {"position_buckets": 256, "norm_rel_ebd": "layer_norm"}
DEBERTA_V3 |= {"share_att_key": True, "position_biased_input": False}
BIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeBERTa-v3": ("deberta-v2", DEBERTA_V3),
    "DeBERTa-v2": ("deberta-v2", {**DEBERTA_V3, "norm_rel_ebd": "none"}),
    "DeBERTa": ("deberta", DEBERTA),
    "SEW-D": ("sew-d", {"norm_rel_ebd": "layer_norm"}),
}


def self_attention(reading: LayerReading) -> list[Any]:
    found = [layers.attention for layers in reading.layers]
    return [facts for facts in found if facts.kind in ("self", "cross")]


@pytest.mark.parametrize(("kind", "options"), BIASES.values(), ids=BIASES)
def test_tables_that_pass_a_norm_are_biases(kind: str, options: dict[str, Any]) -> None:
    """At their real size, at which weights are a single number; the norm of those is zero."""
    config = AutoConfig.for_model(kind, num_hidden_layers=1, vocab_size=64, **options)
    assert config.hidden_size * 2 * 256 > LARGE
    (facts,) = self_attention(inspect(config))
    assert facts.bias == "by content and position"


def test_passes_over_a_layer_are_no_layers() -> None:
    """ALBERT runs one layer as often as its config says."""
    sizes = {"num_hidden_layers": 5, "embedding_size": 64}
    reading = tiny("albert", **sizes)
    (layers,) = reading.layers
    assert (layers.numbers, layers.attention.passes) == ((0,), 5)
    assert titles(reading) == ["the layer"]
    assert "run 5 times over a text" in descriptions(reading)[0]
    assert only(tiny("bert")).passes == 1


DORY = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
DORY |= {"n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
DORY |= {"sliding_window": 32, "head_dim": 16}


@needs_model_type("dory")
def test_layers_of_dory_that_run_twice(tmp_path: Path) -> None:
    """Its file counts attention and the part after it as two layers."""
    config = AutoConfig.for_model("dory", **SIZES | DORY)
    reading = inspect(config)
    by_numbers = {layers.numbers: layers.attention for layers in reading.layers}
    passes = {n: facts.passes for n, facts in by_numbers.items()}
    assert passes == {(0, 6): 1, (1, 7): 1, (2, 4): 2, (3, 5): 2}
    for numbers, facts in by_numbers.items():
        base, back = (1e4, 31) if numbers[0] % 2 == 0 else (1e7, None)
        assert isinstance(facts.rotation, RotationFacts)
        assert facts.rotation.base == pytest.approx(base, rel=1e-3)
        assert facts.back == back
    config.save_pretrained(tmp_path)
    fields = Fields.read(tmp_path)
    assert fields.values["num_hidden_layers"] == 16
    whole = completed(fields.values)
    assert (whole["num_hidden_layers"], whole["layer_types"]) == (8, DORY["layer_types"])
    assert list(disagreements(whole, reading)) == []
    advice = advise(tmp_path, fields, whole, reading)
    ropes = advice.config["rope_parameters"]
    assert ropes["full_attention"]["rope_type"] == "yarn"
    assert ropes["sliding_attention"]["rope_type"] == "default"


@needs_model_type("lara_mini")
def test_only_windows_of_lara_mini_rotate() -> None:
    types = ["linear_attention", "sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 8, "num_experts": 2}
    sizes |= {"layer_types": types, "moe_intermediate_size": 32}
    config = AutoConfig.for_model("lara_mini", **SIZES | sizes)
    recurrent, window, full = (layers.attention for layers in inspect(config).layers)
    assert recurrent.kind == "none"
    assert (window.back, full.back, full.rotation) == (7, None, None)
    assert isinstance(window.rotation, RotationFacts)


@needs_model_type("inkling2_text")
def test_attention_over_earlier_layers_is_no_layer() -> None:
    """Residuals of Inkling 2 attend, for each token, over the outputs of blocks before it."""
    reading = inspect(tiny_config("inkling2_text"))
    assert all(layers.attention.module.endswith(".self_attn") for layers in reading.layers)
    assert {layers.attention.bias for layers in reading.layers} == {"by offset"}


@needs_model_type("inkling2_loop_text")
def test_looped_layers_of_inkling() -> None:
    first, looped = (layers for layers in inspect(tiny_config("inkling2_loop_text")).layers)
    assert (first.numbers, first.attention.passes) == ((0,), 1)
    assert (looped.numbers, looped.attention.passes) == ((1,), 2)
    assert looped.attention.bias == "by offset"


def test_rows_that_an_embedding_slices_are_a_table() -> None:
    """Whisper's decoder ends long before its encoder does."""
    sizes = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    reading = inspect(AutoConfig.for_model("whisper", **sizes, **heads, **ids))
    rows = {table.module: table.rows for table in reading.tables}
    assert rows == {"encoder.embed_positions": 1500, "decoder.embed_positions": 448}
    assert [limit.tokens for limit in limits({}, reading)] == [448, 1500]


def test_spectrograms_whose_rows_are_frames() -> None:
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    (facts,) = self_attention(inspect(AutoConfig.for_model("wav2vec2-bert", **sizes)))
    assert facts.bias == "by offset"


def test_keys_of_zeros_tell_nothing_of_heads() -> None:
    """A constant series is one of zeros after it is normalised."""
    sizes = {**SIZES, "head_dim": 16, "num_key_value_heads": 4}
    del sizes["vocab_size"], sizes["pad_token_id"]
    facts = only(inspect(AutoConfig.for_model("timesfm2_5", **sizes)))
    assert (facts.heads, facts.key_heads) == (4, 4)
