"""Readings of folders, their limits and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import is_detectron2_available

from posenc.attention.backends.native.build import description
from posenc.errors import CheckpointError
from posenc.lab.doctor.report import length_sentences
from posenc.transformers.doctor.advice import limits
from posenc.transformers.doctor.costs import LENGTHS, LayerCost, TensorMemory, _computed
from posenc.transformers.doctor.diagnosis import diagnose
from posenc.transformers.doctor.inspection import inspect
from tests.support.commands import inspect_here, run_command
from tests.support.tiny_models import tiny_model
from tests.transformers.acceleration.cases import layoutlmv2, layoutlmv3, udop
from tests.transformers.acceleration.cases.deberta_v2 import SIZES


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "layoutlmv3", "bert", "camembert"])
def test_models_fail_at_the_length_that_is_told(kind: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_attention_heads": 3}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 20}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind == "layoutlmv3":
        config = transformers.LayoutLMv3Config(**layoutlmv3.SIZES | {"max_position_embeddings": 20})
    model = transformers.AutoModel.from_config(config).eval()
    (limit, *_) = limits(config.to_dict(), inspect(config))
    model(torch.full((1, limit.tokens), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, limit.tokens + 1), 7))


def test_longer_costs_are_computed_by_a_parabola() -> None:
    def cost(length: int) -> LayerCost:
        return LayerCost(
            length, 1e-3 * length + 1e-7 * length**2, 9.0 * length, 1e-3 * length, 1, True
        )

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
    transformers.DebertaV2Config(**SIZES).save_pretrained(tmp_path)
    done = run_command("doctor", str(tmp_path), "--seconds", "0.01", "--json")
    printed = json.loads(done.stdout)
    assert printed["model_type"] == "deberta-v2"
    (layers,) = printed["reading"]["layers"]
    assert layers["attention"]["bias"] == "by content and position"
    assert layers["attention"]["sources"]["bias"].startswith("logits")
    assert printed["reading"]["by"] == "run"
    assert printed["costs"][0]["length"] == 128
    assert printed["kernels"] == description()


def test_costs_are_measured_with_and_without_posenc(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 4096}
    transformers.DebertaV2Config(**sizes).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    first = diagnosis.costs[0]
    assert first.length == 128
    assert first.measured
    for value in (first.seconds, first.bytes, first.accelerated_seconds, first.accelerated_bytes):
        assert value is not None
        assert value > 0
    assert "accelerate" in diagnosis.acceleration
    json.dumps(diagnosis.to_json())


def test_models_without_a_bias_say_so(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert "changes nothing: causal, where PyTorch's kernel is as fast" in diagnosis.acceleration
    assert diagnosis.costs[0].accelerated_seconds is None


def test_models_that_read_more_than_text_say_so(tmp_path: Path) -> None:
    transformers.UdopConfig(**udop.SIZES).save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01, run_seconds=0)
    assert diagnosis.costs == ()
    assert "text alone" in diagnosis.acceleration


@pytest.mark.skipif(is_detectron2_available(), reason="the library is installed")
def test_models_that_need_another_library_say_so(tmp_path: Path) -> None:
    transformers.LayoutLMv2Config(**layoutlmv2.SIZES).save_pretrained(tmp_path)
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


def test_folders_without_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        diagnose(tmp_path)


def test_a_window_that_its_class_switches_off_is_found(tmp_path: Path) -> None:
    """Qwen's classes ignore a window unless ``use_sliding_window`` is true, which is no default."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields = {"model_type": "qwen3", **sizes, "sliding_window": 512, "rope_theta": 1e6}
    for switch in ({}, {"use_sliding_window": True}):
        (tmp_path / "config.json").write_text(json.dumps(fields | switch))
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
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_attention_heads": 3}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 20}
    config = transformers.AutoConfig.for_model("bert", architectures=[architecture], **sizes)
    config.save_pretrained(tmp_path)
    found = diagnose(tmp_path, budget=0)
    assert found.advice.method == method
    assert [(limit.tokens, limit.beyond) for limit in found.limits] == [(20, "breaks")]
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    found = diagnose(tmp_path, budget=0)
    assert [(limit.tokens, limit.beyond) for limit in found.limits] == [
        (20, "breaks"),
        (12, "cuts"),
    ]


def test_untrained_distances_degrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_here(monkeypatch)
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    (limit,) = diagnose(tmp_path, budget=0).limits
    assert (limit.tokens, limit.beyond) == (256, "degrades")
    (told, _) = length_sentences(diagnose(tmp_path, budget=0))
    assert told.startswith("Degrades beyond 256 tokens")
