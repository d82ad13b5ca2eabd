"""Models that another process runs, and the config where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from posenc.transformers.doctor.diagnosis import NotRunError, diagnose, read_by_running
from posenc.transformers.doctor.facts import UNKNOWN, LayerReading, RotationFacts
from posenc.transformers.doctor.inspection import inspect


def write(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def from_config(folder: Path) -> LayerReading:
    """The reading of a config that is not run."""
    reading = diagnose(folder, budget=0, run_seconds=0).reading
    assert reading.by == "config"
    return reading


@pytest.mark.long
def test_the_process_answers_as_the_inspection_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model("gemma2", **sizes, vocab_size=64, intermediate_size=32)
    config.save_pretrained(tmp_path)
    found, expected = read_by_running(tmp_path), inspect(config)
    assert found.layers == expected.layers
    assert found.tables == expected.tables
    assert found.far == expected.far


@pytest.mark.parametrize(
    ("limits", "reason"), [({"seconds": 0.01}, "more than 0 s"), ({"memory": 2**26}, "ended with")]
)
def test_limits_of_the_process(tmp_path: Path, limits: dict[str, Any], reason: str) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(NotRunError, match=reason):
        read_by_running(tmp_path, **limits)


@pytest.mark.long
def test_transformers_own_reason_is_told(tmp_path: Path) -> None:
    write(tmp_path, model_type="new", num_hidden_layers=4, rope_theta=1e4)
    diagnosis = diagnose(tmp_path, budget=0)
    assert "`new`" in diagnosis.reading.reason
    (layers,) = diagnosis.reading.layers
    assert layers.numbers == (0, 1, 2, 3)
    assert layers.attention.sources["rotation"] == "config"
    assert diagnosis.advice.method == ""


def test_layer_types_of_a_config(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "linear_attention", "chunked_attention"]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    write(
        tmp_path, model_type="new", layer_types=types, sliding_window=512, rope_theta=1e4, **sizes
    )
    sliding, full, linear, chunked = (layers.attention for layers in from_config(tmp_path).layers)
    assert (sliding.back, full.back, chunked.chunk) == (511, None, 512)
    assert (linear.kind, linear.instead) == ("none", ("linear_attention",))
    assert isinstance(full.rotation, RotationFacts)
    assert full.rotation.features == 16
    assert full.rotation.base == pytest.approx(1e4)
    assert full.rotation.pairing is full.rotation.varies is None


def test_windows_of_configs_without_layer_types_are_not_guessed(tmp_path: Path) -> None:
    write(tmp_path, model_type="new", num_hidden_layers=4, rope_theta=1e4, sliding_window=512)
    (layers,) = from_config(tmp_path).layers
    assert layers.attention.back == UNKNOWN
    assert layers.attention.kind == UNKNOWN


def test_configs_are_completed_by_transformers(tmp_path: Path) -> None:
    write(tmp_path, model_type="gemma2", num_hidden_layers=4, sliding_window=512)
    windows, full = (layers.attention for layers in from_config(tmp_path).layers)
    assert (windows.back, full.back) == (511, None)
