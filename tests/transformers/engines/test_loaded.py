"""Frequencies of loaded models against their configs, and fields as they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import CheckpointError
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers.doctor.diagnosis import check_source
from posenc.transformers.engines import check
from posenc.transformers.engines.config import ModelConfig
from tests.transformers.engines.released import TRAINED

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 512, "rope_theta": 10000.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
PHI = {"pad_token_id": 0, "rope_scaling": LONG}


def made(family: str = "llama", **fields: Any) -> Any:
    config = transformers.CONFIG_MAPPING[family](**SMALL, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN}),
        ("gpt_neox", {"rotary_pct": 0.5}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("phi3", PHI | {TRAINED: 64, "max_position_embeddings": 128}),
        ("bert", {}),
    ],
)
def test_models_as_they_are_made_have_no_problem(family: str, fields: dict[str, Any]) -> None:
    found = check(made(family, **fields))
    assert [one.problem for one in found] == [""] * len(found)
    assert bool(found) is (family != "bert")
    assert all(one.stated is not None for one in found)


def test_long_factors_of_a_text_past_the_trained_length() -> None:
    model = made("phi3", **PHI | {TRAINED: 16, "max_position_embeddings": 64})
    model(input_ids=torch.zeros(1, 32, dtype=torch.long))
    [one] = check(model)
    assert one.problem == ""
    assert one.own.frequencies[0] == 0.5


def test_soup_793_a_scaling_written_after_the_model_was_made() -> None:
    model = made()
    model.config.rope_parameters = dict(YARN)
    [one] = check(model)
    assert one.path == "model.rotary_emb.inv_freq"
    assert one.problem == "has the gain 1, its config says 1.1386"


def test_unsloth_7028_a_base_that_was_dropped() -> None:
    model = made(rope_theta=500000.0)
    model.model.rotary_emb.inv_freq.copy_(10000.0 ** (-torch.arange(16) / 16))
    [one] = check(model)
    assert one.problem.startswith("has other frequencies than its config says, by up to 3")


def test_frequencies_in_half_precision() -> None:
    [one] = check(made().to(torch.bfloat16))
    assert one.problem.startswith("has other frequencies than its config says, by up to 0.00")


def test_another_width() -> None:
    model = made()
    model.model.rotary_emb.inv_freq = torch.ones(8)
    assert check(model)[0].problem == "rotates 16 features of a head, its config says 32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_in_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    made(rope_parameters=YARN).to(dtype).save_pretrained(tmp_path)
    [one] = check_source(tmp_path)
    assert one.problem == ""
    assert one.own.gain == pytest.approx(1.1386, rel=1e-4)


@pytest.mark.parametrize("method", ["yarn", "rerope", "drope", "yarn+log_n"])
def test_a_folder_that_posenc_extended(method: str, tmp_path: Path) -> None:
    made(max_position_embeddings=64).save_pretrained(tmp_path / "in")
    options: dict[str, Any] = {"methods": method, "factor": 2.0, "report": False}
    extend_checkpoint(tmp_path / "in", tmp_path / "out", **options)
    found = check_source(tmp_path / "out")
    assert [one.problem for one in found] == [""]


def test_a_folder_that_transformers_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    with pytest.raises(CheckpointError, match="got 'novel'"):
        check_source(tmp_path)


# Fields of a model type that transformers does not know, as they are written

WRITTEN = {"model_type": "of_no_library", "hidden_size": 64, "num_attention_heads": 2}
WRITTEN |= {"max_position_embeddings": 2048, "rope_theta": 500.0}


@pytest.mark.parametrize("name", ["", "partial_rotary_factor", "rotary_pct", "rope_pct"])
def test_the_rotated_share_has_several_names(name: str) -> None:
    """All of a head is rotated unless a share is told."""
    rope = ModelConfig.of(WRITTEN | ({name: 0.25} if name else {})).ropes()[""]
    assert (rope.width, rope.head) == (8 if name else 32, 32)
    assert (rope.base, rope.longest) == (500.0, 2048)


@pytest.mark.parametrize("name", ["rope_theta", "rotary_emb_base", "global_rope_theta"])
def test_the_base_has_several_names(name: str) -> None:
    others = {key: value for key, value in WRITTEN.items() if key != "rope_theta"}
    assert ModelConfig.of(others | {name: 700.0}).ropes()[""].base == 700.0


@pytest.mark.parametrize("beside", [None, 512])
@pytest.mark.parametrize("inside", [None, 256])
def test_a_trained_length_beside_the_parameters_is_read_first(
    beside: int | None, inside: int | None
) -> None:
    """As transformers does, which writes it over that of the parameters."""
    scaling = {"rope_type": "yarn", "factor": 4.0} | ({TRAINED: inside} if inside else {})
    fields = WRITTEN | {"rope_scaling": scaling} | ({TRAINED: beside} if beside else {})
    assert ModelConfig.of(fields).ropes()[""].length == (beside or inside or 2048)
