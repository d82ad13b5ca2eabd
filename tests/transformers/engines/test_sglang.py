"""Rules of SGLang, against modules that its own models make for these configs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.engines import ENGINES, ModelConfig, differences
from posenc.transformers.engines.config import NotServedError, UnreadError
from posenc.transformers.engines.rotation import EngineRotation

pytest.importorskip("transformers")

TRAINED = "original_max_position_embeddings"
SIZES = {"num_attention_heads": 2, "hidden_size": 128, "max_position_embeddings": 512}
HEAD = {"head_dim": 64, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, TRAINED: 128, "attn_factor": 1.2}
FULL, WINDOWS = "full_attention", "sliding_attention"


def rotations(family: str, fields: dict[str, Any]) -> dict[str, EngineRotation]:
    config = ModelConfig.of(SIZES | HEAD | {"model_type": family} | fields)
    return ENGINES["SGLang"].rotations(config, 500)


@pytest.mark.parametrize("family", ["gemma", "mixtral", "phi", "stablelm", "starcoder2"])
def test_files_that_pass_no_scaling_on(family: str) -> None:
    """SGLang 0.5.23 has the second frequency 0.7499 and no gain; the scaled one is smaller."""
    fields = {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}}
    [found] = rotations(family, fields).values()
    assert found.gain == 1
    assert found.frequencies[-1] == pytest.approx(1.3335e-4, rel=1e-3)
    config = SIZES | HEAD | {"model_type": family} | fields
    assert differences(config, length=128)["SGLang"] == "ignores the scaling"


@pytest.mark.parametrize("family", ["ernie4_5", "gpt_neox", "nemotron", "smollm3"])
def test_families_by_transformers_own_layers_have_its_gain(family: str) -> None:
    fields = SIZES | HEAD | {"model_type": family, "rope_parameters": YARN}
    assert differences(fields, length=128)["SGLang"] == ""
    own = differences(fields | {"model_type": "llama"}, length=128)["SGLang"]
    assert own.startswith("scales logits by")


@pytest.mark.parametrize(
    ("beside", "slowest", "gain"),
    [({}, 1.3335e-4, 1.0), ({"rope_theta": 5e5, "rope_scaling": YARN}, 7.55e-7, 1.366)],
)
def test_olmo_3_is_read_beside_the_parameters(
    beside: dict[str, Any], slowest: float, gain: float
) -> None:
    """Base 10,000 and no scaling where they are in the parameters alone, as 0.5.23 has it."""
    kinds = {FULL: YARN | {"rope_theta": 5e5}, WINDOWS: {"rope_type": "default", "rope_theta": 5e5}}
    found = rotations("olmo3", {"rope_parameters": kinds, "layer_types": [WINDOWS, FULL]} | beside)
    assert found[FULL].frequencies[-1] == pytest.approx(slowest, rel=1e-2)
    assert found[FULL].gain == pytest.approx(gain, rel=1e-3)
    assert found[WINDOWS].gain == 1


def test_gemma_3_scales_full_layers_alone() -> None:
    """As its graphics cards have it: layers are given the cosines of the whole model."""
    kinds = {FULL: YARN | {"rope_theta": 1e6}, WINDOWS: {"rope_type": "default", "rope_theta": 1e4}}
    found = rotations("gemma3_text", {"rope_parameters": kinds, "layer_types": [WINDOWS, FULL]})
    assert found[WINDOWS].frequencies == pytest.approx([1e4 ** (-t / 32) for t in range(32)])
    assert found[FULL].frequencies[-1] == pytest.approx(1e6 ** (-31 / 32) / YARN["factor"])
    assert found[FULL].gain == pytest.approx(0.1 * math.log(YARN["factor"]) + 1)


def test_gemma_3_has_short_factors_for_all_texts() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e6, TRAINED: 128, "factor": 4.0}
    long |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    kinds = {FULL: long, WINDOWS: {"rope_type": "default", "rope_theta": 1e4}}
    found = rotations("gemma3_text", {"rope_parameters": kinds, "layer_types": [WINDOWS, FULL]})
    assert found[FULL].frequencies == pytest.approx([1e6 ** (-t / 32) for t in range(32)])


def test_unscaled_families_end_before_a_dynamic_context() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(UnreadError, match="end at max_position_embeddings"):
        rotations("gemma", {"rope_parameters": dynamic})


def test_longrope_of_neighbouring_features_is_refused() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, TRAINED: 128, "factor": 4.0}
    long |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "partial_rotary_factor": 0.5}
    with pytest.raises(NotServedError, match="does not rotate neighbouring features"):
        rotations("glm4", {"rope_parameters": long})
    config = ModelConfig.of(SIZES | HEAD | {"model_type": "glm4", "rope_parameters": long})
    with pytest.raises(NotServedError, match="does not rotate neighbouring features"):
        ENGINES["vLLM"].rotations(config, 500)
