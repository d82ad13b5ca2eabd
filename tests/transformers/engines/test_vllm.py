"""Rules of vLLM for models that treat RoPE in a way of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, differences
from posenc.transformers.engines.config import NotServedError
from tests.transformers.engines.released import RELEASED, TRAINED

pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 2048}
SIZES = {"num_attention_heads": 4, "hidden_size": 512, "max_position_embeddings": 8192}
BASE = SIZES | {"rope_theta": 1e4}


def rotation(fields: dict[str, Any], length: int = 1) -> EngineRotation:
    return ENGINES["vLLM"].rotations(ModelConfig.of(fields), length)[""]


@pytest.mark.parametrize("family", ["gpt_neox", "olmo2", "starcoder2", "seed_oss", "smollm3"])
@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0}, YARN])
def test_families_by_transformers_own_layers_rotate_as_it_does(
    family: str, scaling: dict[str, Any]
) -> None:
    """Dynamic NTK too, which its own layers have one base for."""
    fields = BASE | {"model_type": family, "rope_scaling": scaling}
    assert differences(fields, length=8192)["vLLM"] == ""
    for n in (1, 8192, 9000):
        right = ENGINES["transformers"].rotations(ModelConfig.of(fields), n)[""]
        assert rotation(fields, n).like(right)
    own = differences(fields | {"model_type": "llama"}, length=8192)["vLLM"]
    assert bool(own) is (scaling is not YARN)


def test_gpt_oss_is_read_as_yarn_without_a_gain() -> None:
    fields = RELEASED["gpt-oss-20b"]
    usual = 0.1 * math.log(32) + 1
    for more in ({"attention_factor": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}):
        changed = fields | {"rope_scaling": fields["rope_scaling"] | more}
        assert rotation(changed).gain == pytest.approx(usual)
        assert differences(changed, length=4096)["vLLM"].startswith("scales logits by")
    with pytest.raises(NotServedError, match="takes this model with beta_fast alone"):
        rotation(fields | {"rope_scaling": YARN | {"beta_slow": 1.0}})


MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32}


@pytest.mark.parametrize(
    ("family", "gain"), [("deepseek_v3", 1.0), ("minicpm3", 1.2), ("youtu", 1.2)]
)
def test_whose_latent_attention_reads_a_gain(family: str, gain: float) -> None:
    """Only DeepSeek's takes YaRN for its own, which reads ``mscale`` alone."""
    more = {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}
    fields = BASE | MLA | {"model_type": family, "rope_scaling": YARN | more}
    assert rotation(fields).gain == pytest.approx(gain)


def test_a_linear_scaling_of_latent_attention_is_taken_for_yarn() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    fields = BASE | MLA | {"model_type": "deepseek_v3", "rope_scaling": linear}
    with pytest.raises(NotServedError, match=f"linear scaling for YaRN and finds no {TRAINED}"):
        rotation(fields)
    yarn = rotation(fields | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}})
    assert rotation(fields | {"rope_scaling": linear | {TRAINED: 2048}}).frequencies == (
        pytest.approx(yarn.frequencies)
    )


def test_mimo_reads_bases_beside_the_parameters_and_no_scaling() -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    fields = SIZES | {"model_type": "mimo_v2_flash", "head_dim": 128, "swa_head_dim": 128} | kinds
    written = fields | {"rope_theta": 5e6, "swa_rope_theta": 2e4, "partial_rotary_factor": 0.5}
    found = ENGINES["vLLM"].rotations(ModelConfig.of(written), 1)
    for kind, base in (("sliding_attention", 2e4), ("full_attention", 5e6)):
        assert found[kind].frequencies == pytest.approx([base ** (-t / 32) for t in range(32)])
    inside = {"rope_parameters": ModelConfig.of(written).completed["rope_parameters"]}
    lost = ENGINES["vLLM"].rotations(ModelConfig.of(fields | inside), 1)
    assert lost["full_attention"].frequencies[1] == pytest.approx(1e6 ** (-1 / 64))


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_positions_in_chunks_are_not_compared(engine: str) -> None:
    """Of Qwen2.5-1M, whose attention starts its positions anew."""
    chunks = {"chunk_size": 262144, "local_size": 8192}
    fields = RELEASED["Qwen2.5-7B-Instruct-1M"] | {"dual_chunk_attention_config": chunks}
    told = differences(fields, length=262144)
    assert told[engine].startswith("is not compared: it counts positions in chunks")
    assert told["mlx-lm"] == ""


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({}, 8192),
        ({"seq_length": 4096, "max_sequence_length": 16384}, 4096),
        ({"seq_len": 100_000}, 8192),
        ({"model_max_length": 131_072, "seq_length": 4096}, 131_072),
    ],
)
def test_the_longest_text_is_the_smallest_that_a_config_names(
    fields: dict[str, Any], longest: int
) -> None:
    config = ModelConfig.of(BASE | {"model_type": "llama"} | fields)
    assert ENGINES["vLLM"].longest(config) == longest
