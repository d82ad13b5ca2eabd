"""Encodings, limits, extensions and costs of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import is_detectron2_available

from posenc.errors import CheckpointError
from posenc.evaluation.doctor import diagnose
from posenc.evaluation.doctor.costs import PeakMemory
from posenc.evaluation.doctor.positions import positions_of
from posenc.registry import ENCODINGS
from tests.integrations.accelerate.cases import layoutlmv2, udop
from tests.integrations.accelerate.cases.deberta_v2 import SIZES

KNOWN: list[tuple[dict[str, Any], list[tuple[str, int | None]]]] = [
    ({"model_type": "bert", "max_position_embeddings": 512}, [("learned", 513)]),
    ({"model_type": "gpt2", "n_positions": 1024}, [("learned", 1025)]),
    ({"model_type": "mpnet", "max_position_embeddings": 514}, [("learned", 515), ("t5", None)]),
    ({"model_type": "t5"}, [("t5", None)]),
    ({"model_type": "bloom"}, [("alibi", None)]),
    ({"model_type": "falcon", "alibi": True}, [("alibi", None)]),
    ({"model_type": "deberta-v2", "relative_attention": True}, [("deberta", None)]),
    ({"model_type": "deberta-v2", "relative_attention": False}, []),
    ({"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 4096}, [("rope", 4097)]),
    (
        {
            "model_type": "llama",
            "rope_theta": 1e4,
            "max_position_embeddings": 4096,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
        [("rope", 8193)],
    ),
    (
        {
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            },
            "max_position_embeddings": 8192,
        },
        [("rope", 8193), ("rope", 8193)],
    ),
    ({"model_type": "mamba"}, []),
]


@pytest.mark.parametrize(("config", "expected"), KNOWN)
def test_encodings_and_their_limits(
    config: dict[str, Any], expected: list[tuple[str, int | None]]
) -> None:
    found = positions_of(config)
    assert [(place.encoding, place.breaks_at) for place in found] == expected
    assert all(place.encoding in ENCODINGS for place in found)


def test_costs_are_measured_with_and_without_posenc(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 4096}
    transformers.DebertaV2Config(**sizes).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    diagnosis = diagnose(tmp_path, budget=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert diagnosis.extensions["deberta"]
    first = diagnosis.costs[0]
    assert first.length == 128
    assert first.measured
    for value in (first.seconds, first.bytes, first.accelerated_seconds, first.accelerated_bytes):
        assert value is not None
        assert value > 0
    assert "accelerate" in diagnosis.acceleration
    json.dumps(diagnosis.to_json())


def test_models_that_gain_nothing_say_so(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01)
    assert "nothing to gain" in diagnosis.acceleration
    assert diagnosis.costs[0].accelerated_seconds is None


def test_models_that_read_more_than_text_say_so(tmp_path: Path) -> None:
    transformers.UdopConfig(**udop.SIZES).save_pretrained(tmp_path)
    diagnosis = diagnose(tmp_path, budget=0.01)
    assert diagnosis.costs == ()
    assert "text alone" in diagnosis.acceleration


@pytest.mark.skipif(is_detectron2_available(), reason="the library is installed")
def test_models_that_need_another_library_say_so(tmp_path: Path) -> None:
    transformers.LayoutLMv2Config(**layoutlmv2.SIZES).save_pretrained(tmp_path)
    assert "detectron2" in diagnose(tmp_path, budget=0.01).acceleration


def test_peak_memory_counts_what_lives_at_once() -> None:
    with PeakMemory() as memory:
        x = torch.ones(1000)
        for _ in range(5):
            x = x + 1
    assert 8000 <= memory.peak <= 12000


def test_folders_without_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        diagnose(tmp_path)
