"""Advice, limits, and findings where config and layers disagree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from posenc.transformers.checkpoints import Fields
from posenc.transformers.doctor.advice import Advice, advise, config_lines, limits
from posenc.transformers.doctor.config_findings import disagreements
from posenc.transformers.doctor.facts import UNKNOWN, LayerReading, Layers
from posenc.transformers.doctor.inspection import inspect
from tests.transformers.doctor.test_inspection import SIZES


def advised(folder: Path, kind: str, **options: Any) -> tuple[Advice, LayerReading, Any]:
    config = AutoConfig.for_model(kind, **SIZES | options)
    config.save_pretrained(folder)
    reading = inspect(config)
    return advise(folder, Fields.read(folder), config.to_dict(), reading), reading, config


def test_the_lines_of_the_advice_stretch_what_grows_with_the_text(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    advice, before, config = advised(
        tmp_path, "gemma3_text", head_dim=16, sliding_window=32, layer_types=types
    )
    assert advice.method == "yarn"
    assert advice.command == f"posenc extend {tmp_path} --method yarn --factor 4"
    changed = type(config).from_dict({**config.to_dict(), **advice.config})
    after = inspect(changed)
    for layers, changed_layers in zip(before.layers, after.layers, strict=True):
        old, new = layers.attention.rotation, changed_layers.attention.rotation
        if layers.attention.windowed:
            assert new.alike(old)
        else:
            assert new.gain == pytest.approx(1.13863, rel=1e-4)
            assert new.frequencies[-1] == pytest.approx(old.frequencies[-1] / 4, rel=1e-4)
    assert changed.max_position_embeddings == 1024
    assert config_lines(advice)[0] == '  "max_position_embeddings": 1024,'


def test_the_command_is_one_that_extend_takes(tmp_path: Path) -> None:
    advice, reading, config = advised(tmp_path, "llama")
    assert advice.command == f"posenc extend {tmp_path} --method yarn --factor 4"
    assert advice.config["rope_parameters"]["rope_type"] == "yarn"
    assert [limit.tokens for limit in limits(config.to_dict(), reading)] == [256]
    advice, *_ = advised(tmp_path, "gpt2", n_head=4, n_embd=64, n_layer=1)
    assert advice.command == f"posenc extend {tmp_path} --method interpolate --factor 4"
    advice, *_ = advised(tmp_path, "gptj", n_layer=1, n_head=4, n_embd=64, rotary_dim=16)
    assert advice.command == f"posenc extend {tmp_path} --method yarn --factor 4"
    assert advice.config == {}


JAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}

NONE: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({"sliding_window": 16}, "beyond its window"),
    "mamba": ({}, "no layer has attention"),
    "bloom": ({"n_head": 4, "n_layer": 1}, "a bias"),
    "llama": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "of type linear already",
    ),
    "jamba": (JAMBA, "no layer encodes positions"),
}


@pytest.mark.parametrize(("kind", "options", "why"), [(k, *v) for k, v in NONE.items()])
def test_none_is_advised_with_the_reason(
    kind: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    advice, reading, config = advised(tmp_path, kind, **options)
    assert (advice.method, advice.command, advice.config) == ("", "", {})
    assert why in advice.why
    if kind in ("mistral", "mamba", "bloom", "jamba"):
        assert limits(config.to_dict(), reading) == ()


def test_unknown_rotations_are_not_advised_on(tmp_path: Path) -> None:
    _, reading, config = advised(tmp_path, "llama")
    facts = replace(reading.layers[0].attention, rotation=UNKNOWN)
    unknown = replace(reading, layers=(Layers(numbers=(0, 1), attention=facts),))
    advice = advise(tmp_path, Fields.read(tmp_path), config.to_dict(), unknown)
    assert "not known" in advice.why


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sliding_window": ({"sliding_window": 64}, "does not limit what any layer sees"),
    "layer_types": ({"layer_types": ["sliding_attention"] * 2}, "2 layers of sliding_attention"),
    "rope_theta": ({"rope_parameters": {"rope_theta": 5e5}}, "by a base of 10,000"),
}


@pytest.mark.parametrize(("field", "change", "problem"), [(k, *v) for k, v in WRONG.items()])
def test_contradictions_are_found(field: str, change: dict[str, Any], problem: str) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    reading = inspect(config)
    assert list(disagreements(config.to_dict(), reading)) == []
    (finding,) = disagreements({**config.to_dict(), **change}, reading)
    assert finding.field == field
    assert problem in finding.problem
    assert not list(disagreements({**config.to_dict(), **change}, replace(reading, by="config")))


def test_a_rotation_that_no_layer_makes() -> None:
    config = AutoConfig.for_model("jamba", **SIZES, **JAMBA)
    fields = config.to_dict() | {"rope_theta": 1e4}
    (finding,) = disagreements(fields, inspect(config))
    assert finding.problem == "no layer rotates"
