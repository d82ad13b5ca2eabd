"""Rules as engines ran them: small checkpoints whose logits were those of these rotations."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, differences
from posenc.transformers.engines.config import NotServedError, UnreadError
from posenc.transformers.engines.serving import gguf_keys

pytest.importorskip("transformers")

USUAL = 0.1 * math.log(4) + 1
"""YaRN's gain at a factor of 4."""

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 128, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, TRAINED: 128, "rope_theta": 1e4} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def config_of(family: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    latent = LATENT if family in ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu") else {}
    given = {"model_type": family, **SIZES, **latent, "rope_parameters": parameters}
    return given | {"rope_scaling": parameters, "rope_theta": 1e4} | fields


def rotation(engine: str, fields: dict[str, Any]) -> EngineRotation:
    [found] = ENGINES[engine].rotations(ModelConfig.of(fields), 512).values()
    return found


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "youtu"])
@pytest.mark.parametrize(
    ("parameters", "gain", "scale"),
    [
        (YARN, USUAL, USUAL**2),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
        (LINEAR, 1.0, USUAL**2),
        ({"rope_type": "default", "rope_theta": 1e4}, 1.0, 1.0),
    ],
)
def test_llama_cpp_scales_all_logits_of_latent_attention(
    family: str, parameters: dict[str, Any], gain: float, scale: float
) -> None:
    found = rotation("llama.cpp", config_of(family, parameters))
    assert found.gain == pytest.approx(gain)
    assert found.scale == pytest.approx(scale)


def test_a_scale_of_all_logits_is_a_difference() -> None:
    found = differences(config_of("deepseek_v3", YARN), length=128)["llama.cpp"]
    assert found == f"scales logits by {USUAL**4:.3g} instead of {USUAL**2:.3g}"
    found = differences(config_of("deepseek_v3", LINEAR), length=128)["llama.cpp"]
    assert found == f"scales logits by {USUAL**2:.3g} instead of 1"
    other = EngineRotation((1.0,), 2.0, 0.5)
    assert other.logit_gain == 2.0
    assert not other.like(EngineRotation((1.0,), 2.0))


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx-lm"])
@pytest.mark.parametrize(
    ("every", "scale"), [(None, 1.0), (-1.35, (1 - 0.135 * math.log(4)) ** -2)]
)
def test_logits_of_minicpm3_lose_their_scale(
    engine: str, every: float | None, scale: float
) -> None:
    parameters = YARN if every is None else YARN | {"mscale": 1.0, "mscale_all_dim": every}
    assert rotation(engine, config_of("minicpm3", parameters)).scale == pytest.approx(scale)


@pytest.mark.parametrize("family", ["cohere", "cohere2_moe", "falcon_h1", "gemma", "glm"])
def test_llama_cpp_is_given_no_gain_for_models_without_yarn(family: str) -> None:
    """Its key of the gain scales logits of every model, also of those that do not rotate by it."""
    fields = config_of(family, YARN | {"attention_factor": 1.4})
    keys = gguf_keys(ModelConfig.of(fields), goal=512)
    assert keys is not None
    assert not any(key.endswith("attn_factor") for key in keys)
    given = gguf_keys(ModelConfig.of(fields | {"model_type": "llama"}), goal=512)
    assert given is not None
    assert given["llama.rope.scaling.attn_factor"][0] == pytest.approx(1.4 / USUAL)


@pytest.mark.parametrize("family", ["cohere2_moe", "falcon_h1"])
def test_llama_cpp_does_not_scale(family: str) -> None:
    found = rotation("llama.cpp", config_of(family, YARN, head_dim=64))
    assert found.like(rotation("llama.cpp", config_of("llama", {"rope_theta": 1e4}, head_dim=64)))


def test_the_converter_of_afmoe_takes_no_llama3() -> None:
    with pytest.raises(NotServedError, match="no tensor"):
        rotation("llama.cpp", config_of("afmoe", LLAMA3))


@pytest.mark.parametrize(
    ("family", "missing"),
    [("exaone", "num_layers"), ("mellum", "num_experts"), ("qwen3_moe", "num_experts")],
)
def test_mlx_lm_needs_names_that_transformers_does_not_write(family: str, missing: str) -> None:
    with pytest.raises(NotServedError, match=f"no {missing}"):
        rotation("mlx-lm", config_of(family, YARN))


def test_mlx_lm_does_not_read_what_is_in_rope_parameters_alone() -> None:
    parameters = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    fields = config_of("deepseek_v3", parameters, rope_scaling=None)
    assert rotation("mlx-lm", fields).scale == pytest.approx(USUAL**-2)


def test_long_rope_of_mlx_lm_pairs_other_features_of_latent_attention() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, TRAINED: 128}
    long |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    with pytest.raises(UnreadError, match="pairs other features"):
        rotation("mlx-lm", config_of("deepseek_v3", long))


def test_windows_of_mellum_rotate_by_the_base_of_the_others_in_llama_cpp() -> None:
    every = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {"model_type": "mellum", **SIZES, "head_dim": 64, "rope_parameters": every}
    fields |= {"layer_types": ["sliding_attention", "full_attention"]}
    found = ENGINES["llama.cpp"].rotations(ModelConfig.of(fields), 512)
    assert found["sliding_attention"].like(found["full_attention"])


def test_llama3_of_internlm3_is_converted() -> None:
    fields = config_of("internlm3", LLAMA3)
    assert rotation("llama.cpp", fields).like(rotation("transformers", fields))


@pytest.mark.parametrize(
    ("classes", "architecture"),
    [(["LlamaForCausalLM"], "llama"), (["ExaoneForCausalLM"], "exaone"), ([], "exaone")],
)
def test_keys_of_gguf_are_those_of_the_class(classes: list[str], architecture: str) -> None:
    """transformers 5 saves Exaone as a Llama, of which the converter makes a file of llama's."""
    fields = config_of("exaone", YARN) | {"architectures": classes}
    keys = gguf_keys(ModelConfig.of(fields), goal=512)
    assert keys is not None
    assert {key.partition(".")[0] for key in keys} == {architecture}
