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
from posenc.evaluation.doctor.costs import LENGTHS, Cost, PeakMemory, _computed
from posenc.evaluation.doctor.positions import positions_of
from posenc.integrations.transformers.accelerate import FAMILIES
from posenc.registry import ENCODINGS
from tests.integrations.accelerate.cases import CASES, layoutlmv2, layoutlmv3, udop
from tests.integrations.accelerate.cases.deberta_v2 import SIZES
from tests.support.commands import run_command

KNOWN: list[tuple[dict[str, Any], list[tuple[str, int | None]]]] = [
    ({"model_type": "bert", "max_position_embeddings": 512}, [("learned", 513)]),
    ({"model_type": "gpt2", "n_positions": 1024}, [("learned", 1025)]),
    ({"model_type": "mpnet", "max_position_embeddings": 514}, [("learned", 513), ("t5", None)]),
    (
        {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1},
        [("learned", 513)],
    ),
    ({"model_type": "vitdet"}, []),
    ({"model_type": "vitdet", "use_relative_position_embeddings": True}, [("decomposed2d", None)]),
    ({"model_type": "sam_vision_model", "use_rel_pos": False}, []),
    ({"model_type": "wav2vec2-bert"}, [("shaw", None)]),
    ({"model_type": "wav2vec2-conformer", "position_embeddings_type": "rotary"}, [("rope", None)]),
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
        [("rope", 8193), ("rope", None)],
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


@pytest.mark.parametrize("family", list(FAMILIES))
def test_accelerated_models_have_a_known_encoding(family: str) -> None:
    case = next(case for key, case in CASES.items() if key.startswith(f"{family}-"))
    found = positions_of(case.make().config.to_dict())
    assert found
    assert all(place.encoding in ENCODINGS for place in found)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "layoutlmv3", "bert", "camembert"])
def test_models_fail_at_the_length_that_is_told(kind: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_attention_heads": 3}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 20}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind == "layoutlmv3":
        config = transformers.LayoutLMv3Config(**layoutlmv3.SIZES | {"max_position_embeddings": 20})
    model = transformers.AutoModel.from_config(config).eval()
    (place, *_) = positions_of(config.to_dict())
    assert place.breaks_at is not None
    model(torch.full((1, place.breaks_at - 1), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, place.breaks_at), 7))


def test_longer_costs_are_computed_by_a_parabola() -> None:
    def cost(length: int) -> Cost:
        return Cost(length, 1e-3 * length + 1e-7 * length**2, 9.0 * length, 1e-3 * length, 1, True)

    longer = _computed([cost(length) for length in LENGTHS[:4]])
    assert [row.length for row in longer] == [32768, 131072]
    for row in longer:
        exact = cost(row.length)
        assert not row.measured
        assert row.seconds == pytest.approx(exact.seconds)
        assert row.bytes == pytest.approx(exact.bytes)
        assert row.accelerated_seconds == pytest.approx(exact.accelerated_seconds)


def test_the_command_prints_json(tmp_path: Path) -> None:
    transformers.DebertaV2Config(**SIZES).save_pretrained(tmp_path)
    done = run_command("doctor", str(tmp_path), "--seconds", "0.01", "--json")
    printed = json.loads(done.stdout)
    assert printed["model_type"] == "deberta-v2"
    assert printed["positions"][0]["encoding"] == "deberta"
    assert printed["costs"][0]["length"] == 128


def test_costs_are_measured_with_and_without_posenc(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 4096}
    transformers.DebertaV2Config(**sizes).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    diagnosis = diagnose(tmp_path, budget=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert diagnosis.extensions == {"deberta": ()}, "posenc extend does not write it"
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
    diagnosis = diagnose(tmp_path, budget=0.01)
    assert "nothing was changed" in diagnosis.acceleration
    assert "windows" in diagnosis.acceleration
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
