"""Readings of folders, their limits and costs."""

from __future__ import annotations

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_detectron2_available

import posenc
from posenc.attention.backends.native.build import description
from posenc.lab.doctor.report import facts_table
from posenc.transformers.doctor.advice import limits
from posenc.transformers.doctor.costs import LENGTHS, LayerCost, TensorMemory, _computed
from posenc.transformers.doctor.diagnosis import NotRunError, diagnose, read_by_running
from posenc.transformers.doctor.facts import UNKNOWN, LayerReading
from posenc.transformers.doctor.inspection import inspect
from tests.support.commands import inspect_here, printed_json
from tests.support.tiny_models import tiny_model
from tests.transformers.acceleration.cases.images import LAYOUT, LAYOUT_V2, UDOP
from tests.transformers.acceleration.cases.texts import DEBERTA_V2

SHORT: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_attention_heads": 3}
SHORT |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 20}
SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def write(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "layoutlmv3", "bert", "camembert"])
def test_models_fail_at_the_length_that_is_told(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SHORT)
    if kind == "layoutlmv3":
        config = transformers.LayoutLMv3Config(**LAYOUT | {"max_position_embeddings": 20})
    model = transformers.AutoModel.from_config(config).eval()
    (limit, *_) = limits(config.to_dict(), inspect(config))
    model(torch.full((1, limit.tokens), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit.tokens + 1), 7))


def test_longer_costs_are_computed_by_a_parabola() -> None:
    def cost(length: int) -> LayerCost:
        seconds = 1e-3 * length + 1e-7 * length**2
        return LayerCost(length, seconds, 9.0 * length, 1e-3 * length, 1, True)

    longer = _computed([cost(length) for length in LENGTHS[:4]])
    assert [row.length for row in longer] == [32768, 131072]
    for row in longer:
        exact = cost(row.length)
        assert not row.measured
        assert row.seconds == pytest.approx(exact.seconds)
        assert row.bytes == pytest.approx(exact.bytes)
        assert row.accelerated_seconds == pytest.approx(exact.accelerated_seconds)


def test_the_command_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_here(monkeypatch)
    transformers.DebertaV2Config(**DEBERTA_V2).save_pretrained(tmp_path)
    told = printed_json("doctor", tmp_path, "--seconds", "0.01")
    assert told["model_type"] == "deberta-v2"
    (layers,) = told["reading"]["layers"]
    assert layers["attention"]["bias"] == "by content and position"
    assert layers["attention"]["sources"]["bias"].startswith("logits")
    assert told["reading"]["by"] == "run"
    assert told["costs"][0]["length"] == 128
    assert told["kernels"] == description()


def test_costs_are_measured_with_and_without_posenc(tmp_path: Path) -> None:
    sizes = DEBERTA_V2 | {"max_position_embeddings": 4096}
    transformers.DebertaV2Config(**sizes).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    first = diagnosis.costs[0]
    assert first.length == 128
    assert first.measured
    for value in (first.seconds, first.bytes, first.accelerated_seconds, first.accelerated_bytes):
        assert value > 0
    assert "accelerate" in diagnosis.acceleration
    json.dumps(diagnosis.to_json())


def test_causal_models_are_measured_with_posencs_attention_too(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    first = diagnose(tmp_path, budget=0.01, run_seconds=0).costs[0]
    assert first.accelerated_seconds is not None
    assert first.accelerated_seconds > 0


def test_models_that_posenc_does_not_compute_say_so(tmp_path: Path) -> None:
    transformers.DogeConfig(**SMALL).save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert "leaves attention as it is: a mask of all pairs" in diagnosis.acceleration
    assert diagnosis.costs[0].accelerated_seconds is None


def test_models_that_read_more_than_text_say_so(tmp_path: Path) -> None:
    transformers.UdopConfig(**UDOP).save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert diagnosis.costs == ()
    assert "text alone" in diagnosis.acceleration


@pytest.mark.skipif(is_detectron2_available(), reason="the library is installed")
def test_models_that_need_another_library_say_so(tmp_path: Path) -> None:
    transformers.LayoutLMv2Config(**LAYOUT_V2).save_pretrained(tmp_path)
    assert "detectron2" in diagnose(tmp_path, budget=0.01, run_seconds=0).acceleration


def test_peak_memory_counts_what_lives_at_once() -> None:
    with TensorMemory() as memory:
        x = torch.ones(1000)
        for _ in range(5):
            x = x + 1
    assert 8000 <= memory.peak <= 12000


def test_a_loaded_model_is_diagnosed_as_its_folder(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    of_folder = diagnose(tmp_path, budget=0, run_seconds=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    of_model = diagnose(loaded, budget=0, run_seconds=0)
    assert of_model.reading.layers == of_folder.reading.layers
    assert of_model.advice == of_folder.advice
    assert str(tmp_path) in str(of_model.advice.command)


def test_a_window_that_its_class_switches_off_is_found(tmp_path: Path) -> None:
    """Qwen's classes ignore a window unless ``use_sliding_window`` is true, which is no default."""
    fields = {"model_type": "qwen3", **SMALL, "sliding_window": 512, "rope_theta": 1e6}
    for switch in ({}, {"use_sliding_window": True}):
        write(tmp_path, **fields, **switch)
        found = diagnose(tmp_path, budget=0, run_seconds=0).findings
        assert ("sliding_window" in [one.field for one in found]) is not bool(switch)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("BertModel", "random_tail"), ("BertForMaskedLM", ""), ("BertLMHeadModel", "interpolate")],
)
def test_longer_tables_are_advised_as_the_guide_does(
    architecture: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_here(monkeypatch)
    config = AutoConfig.for_model("bert", architectures=[architecture], **SHORT)
    config.save_pretrained(tmp_path)
    found = diagnose(tmp_path, budget=0)
    assert found.advice.method == method
    assert [(limit.tokens, limit.beyond) for limit in found.limits] == [(20, "breaks")]
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    found = diagnose(tmp_path, budget=0)
    told = [(limit.tokens, limit.beyond) for limit in found.limits]
    assert told == [(20, "breaks"), (12, "cuts")]


def test_untrained_distances_degrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_here(monkeypatch)
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    (limit,) = diagnose(tmp_path, budget=0).limits
    assert (limit.tokens, limit.beyond) == (256, "degrades")
    rows = facts_table(diagnose(tmp_path, budget=0), None).rows
    told = {name.text: text.text for name, text in rows}
    assert told["degrades beyond"].startswith("256 tokens")


# Models that another process runs, and the config where it cannot


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
    fields = {"model_type": "new", "layer_types": types, "sliding_window": 512, "rope_theta": 1e4}
    write(tmp_path, **fields, **sizes)
    sliding, full, linear, chunked = (layers.attention for layers in from_config(tmp_path).layers)
    assert (sliding.back, full.back, chunked.chunk) == (511, None, 512)
    assert (linear.kind, linear.instead) == ("none", ("linear_attention",))
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


# Code of a model's folder never runs, whoever answers a question whether it may

LLAMA = {"model_type": "llama", "intermediate_size": 16, **SMALL}
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaModel):
    config_class = OwnConfig
"""
LOADING = ("from_pretrained", "from_config")
"""Functions of classes of transformers that may load code."""


@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_a_folder_with_code(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    fields = {**LLAMA, "model_type": model_type, "auto_map": classes}
    write(tmp_path, **fields)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    inspect_here(monkeypatch)
    found = diagnose(tmp_path, budget=0.01)
    assert found.model_type == model_type
    assert bool(found.costs) == (model_type == "llama")
    assert not mark.exists()


def test_every_call_that_may_load_code_refuses_it() -> None:
    calls = []
    for file in Path(posenc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOADING:
                given = {k.arg: k.value for k in node.keywords}
                refused = given.get("trust_remote_code")
                calls.append((file.name, isinstance(refused, ast.Constant) and not refused.value))
    assert len(calls) >= 6
    assert [name for name, refused in calls if not refused] == []


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "model type": {"model_type": "of_nobody"},
    "rope type": {"rope_parameters": {"rope_type": "of_nobody", "rope_theta": 1e4}},
    "layer list": {"layer_types": ["full_attention", "of_nobody"]},
    "short layer list": {"layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("fields", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_transformers_does_not_know_is_not_measured(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, **LLAMA | fields)
    found = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert found.costs == ()
    assert found.acceleration.startswith("Costs were not measured")
