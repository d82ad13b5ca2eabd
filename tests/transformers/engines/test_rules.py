"""Rules of mlx-lm, against frequencies that its own models have, and of vLLM."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.engines import ENGINES, ModelConfig, differences, no_engine_has
from posenc.transformers.engines.config import NotServedError, UnreadError
from posenc.transformers.engines.mlx_lm import FILES, NAMED, PARTS, REFUSED, STEP, UNREAD
from posenc.transformers.engines.rotation import EngineRotation
from tests.transformers.engines.released import RELEASED, TRAINED

pytest.importorskip("transformers")

SIZES = {"num_attention_heads": 4, "hidden_size": 512, "max_position_embeddings": 8192}
BASE = {"rope_theta": 3e5}
YARN = {"type": "yarn", "factor": 4.0, TRAINED: 2048}
TELECHAT = YARN | {"type": "telechat3-yarn"}
LINEAR = {"type": "linear", "factor": 2.0}
EXAONE = {"num_layers": 2, "layer_norm_epsilon": 1e-5}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [1 + pair / 10 for pair in range(64)],
}
MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32}


def rotations(fields: dict[str, Any]) -> dict[str, EngineRotation]:
    return ENGINES["mlx-lm"].rotations(ModelConfig.of(SIZES | fields), 8192)


@pytest.mark.parametrize(
    ("family", "fields", "features", "slowest", "gain"),
    [
        ("Klear", BASE, 128, 4.059e-06, 1),
        ("baichuan_m1", BASE | {"rope_scaling": YARN}, 128, 4.059e-06, 1),
        ("bailing_moe", BASE | {"rope_scaling": YARN}, 128, 1.015e-06, 1.139),
        ("bailing_moe", BASE | {"partial_rotary_factor": 0.25}, 32, 7.332e-06, 1),
        ("bailing_moe", BASE | {"rotary_dim": 64, "partial_rotary_factor": 0.25}, 64, 4.944e-06, 1),
        ("bailing_moe_linear", BASE | {"rotary_dim": 64}, 128, 4.059e-06, 1),
        ("bailing_hybrid", BASE | MLA | {"rope_scaling": YARN}, 64, 1.236e-06, 1.139),
        ("exaone", BASE | EXAONE | {"rope_scaling": LINEAR}, 128, 2.03e-06, 1),
        ("internlm2", BASE | {"rope_scaling": LINEAR}, 128, 2.03e-06, 1),
        ("iquestloopcoder", {"rope_scaling": YARN} | BASE, 128, 1.015e-06, 1.139),
        ("minicpm", BASE | {"rope_scaling": YARN}, 128, 1.015e-06, 1.139),
        ("nanochat", BASE | {"rope_scaling": YARN}, 128, 4.059e-06, 1),
        ("olmo_hybrid", {"rope_parameters": BASE | YARN}, 128, 4.059e-06, 1),
        ("phimoe", BASE, 128, 4.059e-06, 1),
        ("qwen", BASE, 128, 0.0001155, 1),
        ("solar_open", BASE | {"partial_rotary_factor": 0.25}, 32, 7.332e-06, 1),
        ("telechat3", BASE | {"rope_scaling": TELECHAT}, 128, 1.015e-06, 1.139),
        ("youtu_llm", MLA | BASE, 64, 4.944e-06, 1),
        ("minimax_m2", BASE | {"rotary_dim": 64, "head_dim": 128}, 64, 4.944e-06, 1),
    ],
)  # fmt: skip
def test_frequencies_as_its_models_have_them(
    family: str, fields: dict[str, Any], features: int, slowest: float, gain: float
) -> None:
    """Of mlx-lm 0.32.2, whose models of these configs were made and their layers read."""
    [found] = rotations({"model_type": family} | fields).values()
    assert 2 * len(found.frequencies) == features
    assert found.frequencies[-1] == pytest.approx(slowest, rel=1e-3)
    assert found.gain == pytest.approx(gain, abs=1e-3)


@pytest.mark.parametrize(
    ("outer", "family", "fields", "slowest"),
    [
        ("qwen3_vl", "qwen3_vl_text", BASE, 4.059e-06),
        ("qwen2_5_vl", "qwen2_5_vl_text", BASE, 4.059e-06),
        ("mistral3", "mistral", BASE | {"rope_scaling": YARN}, 1.015e-06),
        ("lfm2-vl", "lfm2", BASE | {"rope_scaling": YARN}, 4.059e-06),
        ("muse_glimmer", "muse_glimmer_text", {"rope_parameters": BASE | YARN}, 4.059e-06),
        ("muse_spark", "muse_spark_text", {"rope_parameters": BASE | YARN}, 4.059e-06),
    ],
)
def test_the_file_of_a_model_with_a_part_for_text(
    outer: str, family: str, fields: dict[str, Any], slowest: float
) -> None:
    text = SIZES | {"model_type": family, "head_dim": 128} | fields
    [found] = rotations({"model_type": outer, "text_config": text}).values()
    assert found.frequencies[63] == pytest.approx(slowest, rel=1e-3)
    if family not in FILES and NAMED.get(family, family) not in FILES:
        with pytest.raises(NotServedError, match="has no model"):
            rotations(text)


def test_minimax_m3_reads_all_in_the_parameters() -> None:
    text = SIZES | {"model_type": "minimax_m3_vl_text", "head_dim": 128, "rope_theta": 1e4}
    parameters = BASE | YARN | {"partial_rotary_factor": 0.5}
    whole = {"model_type": "minimax_m3_vl", "text_config": text | {"rope_parameters": parameters}}
    [found] = rotations(whole).values()
    assert found.frequencies[31] == pytest.approx(1.236e-06, rel=1e-3)
    assert len(found.frequencies) == 32


@pytest.mark.parametrize(
    ("family", "full", "slowest", "pairs"),
    [
        ("mellum", {"rope_type": "linear", "factor": 4.0}, 2.455e-06, 64),
        ("laguna", {"rope_type": "linear", "factor": 4.0}, 6.138e-07, 64),
        ("laguna", {"rope_type": "default", "partial_rotary_factor": 0.5}, 3.014e-06, 32),
        ("spark2_5", {"rope_type": "default", "partial_rotary_factor": 0.5}, 3.014e-06, 32),
        ("spark2_5", {"rope_type": "linear", "factor": 4.0}, 2.455e-06, 64),
    ],
)
def test_parameters_by_layer_type(
    family: str, full: dict[str, Any], slowest: float, pairs: int
) -> None:
    windows = {"rope_type": "default", "rope_theta": 1e4}
    every = {"full_attention": full | {"rope_theta": 5e5}, "sliding_attention": windows}
    fields = {"model_type": family, "head_dim": 128, "rope_parameters": every, "num_experts": 2}
    found = rotations(fields | {"layer_types": ["sliding_attention", "full_attention"]})
    assert found["sliding_attention"].frequencies[63] == pytest.approx(1e4 ** (-63 / 64))
    assert found["full_attention"].frequencies[-1] == pytest.approx(slowest, rel=1e-3)
    assert len(found["full_attention"].frequencies) == pairs


def test_windows_of_gemma_3n_and_mimo_have_a_base_of_their_own() -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text = SIZES | {"model_type": "gemma3n_text", "head_dim": 128, "rope_theta": 1e6} | kinds
    mimo = SIZES | {"model_type": "mimo_v2_flash", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    for fields, name, width in (
        ({"model_type": "gemma3n", "text_config": text}, "rope_local_base_freq", 128),
        (mimo | {"head_dim": 128, "swa_head_dim": 128} | kinds, "swa_rope_theta", 64),
    ):
        part = fields.get("text_config", fields)
        with pytest.raises(NotServedError, match=f"no {name}"):
            rotations(fields)
        part[name] = 2e4
        found = rotations(fields)
        for kind, base in (("sliding_attention", 2e4), ("full_attention", 1e6)):
            pairs = [base ** (-2 * pair / width) for pair in range(width // 2)]
            assert found[kind].frequencies == pytest.approx(pairs)


@pytest.mark.parametrize(
    ("family", "scaling", "beside", "gain"),
    [
        ("phi3", LONG, {TRAINED: 1024}, math.sqrt(1 + math.log(8) / math.log(1024))),
        ("phi3", LONG | {TRAINED: 1024}, {}, math.sqrt(1 + math.log(2) / math.log(4096))),
        ("phimoe", LONG | {"short_mscale": 1.1, "long_mscale": 1.3}, {TRAINED: 1024}, 1.3),
        ("llama", LONG | {TRAINED: 1024}, {}, math.sqrt(1 + math.log(8) / math.log(1024))),
    ],
)
def test_longrope(
    family: str, scaling: dict[str, Any], beside: dict[str, Any], gain: float
) -> None:
    [found] = rotations({"model_type": family, "rope_scaling": scaling} | BASE | beside).values()
    assert found.frequencies[63] == pytest.approx(3e5 ** (-63 / 64) / 7.3)
    assert found.gain == pytest.approx(gain)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", BASE | {"rope_scaling": LONG}, "longrope scaling is incomplete"),
        ("llama", BASE | {"rope_scaling": LONG | {"type": "su"}}, "knows no rope_type 'su'"),
        ("llama", BASE | {"rope_scaling": {"type": "linear"}}, "linear scaling is incomplete"),
        ("phimoe", BASE | {"rope_scaling": LONG}, "long_factor, long_mscale, short_factor and"),
        ("phi3", BASE | {"rope_scaling": YARN}, "with long_factor and type"),
        ("internlm3", BASE | {"rope_scaling": YARN | {"rope_type": "yarn"}}, "dynamic and linear"),
        ("deepseek_v2", BASE | MLA, "has no rope_scaling"),
        ("minicpm3", BASE | MLA | {"rope_scaling": None}, "has no rope_scaling"),
        ("exaone4", BASE | {"head_dim": 128}, "has no rope_scaling"),
        ("gpt_oss", {"rope_scaling": LONG | {TRAINED: 1024}}, "proportional and yarn scaling"),
        ("phi", BASE | {"num_attention_heads": 8}, "cannot rotate 25 features"),
        ("glm4", BASE, "no partial_rotary_factor beside the parameters"),
        ("minimax", BASE | {"head_dim": 128}, "no rotary_dim"),
        ("ministral3", BASE, "no llama_4_scaling_beta in rope_parameters"),
        ("olmo", BASE, "configs of ai2-olmo alone"),
        ("youtu", BASE | MLA, "has no model youtu"),
        ("qwen3_5_text", BASE, "has no model qwen3_5_text"),
        ("gemma3", BASE, "has no text_config"),
    ],
)
def test_what_it_does_not_start_with(family: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotServedError, match=reason) as raised:
        rotations({"model_type": family} | fields)
    assert not isinstance(raised.value, UnreadError)


def test_ling_3_is_known_by_its_class() -> None:
    fields = MLA | {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    [found] = rotations(fields | {"rope_scaling": YARN, "rope_theta": 6e6}).values()
    assert found.frequencies[31] == pytest.approx(6.786e-08, rel=1e-3)


def test_models_without_a_rule_are_not_said_to_be_refused() -> None:
    fields = SIZES | BASE | {"model_type": "plamo3"}
    told = differences(fields, length=8192)["mlx-lm"]
    assert told.startswith("is not compared: its config does not state which layers")
    assert not no_engine_has("plamo3")


def test_every_model_is_in_one_table() -> None:
    tables = [set(FILES), set(REFUSED), set(UNREAD), {STEP}]
    assert len(set().union(*tables)) == sum(map(len, tables))
    read = {name for parts in PARTS.values() for name in parts.values()}
    assert read | set(NAMED.values()) <= set().union(*tables, PARTS)


# vLLM, for models that treat RoPE in a way of their own

OWN_YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 2048}
PLAIN = SIZES | {"rope_theta": 1e4}


def rotation(fields: dict[str, Any], length: int = 1) -> EngineRotation:
    return ENGINES["vLLM"].rotations(ModelConfig.of(fields), length)[""]


@pytest.mark.parametrize("family", ["gpt_neox", "olmo2", "starcoder2", "seed_oss", "smollm3"])
@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0}, OWN_YARN])
def test_families_by_transformers_own_layers_rotate_as_it_does(
    family: str, scaling: dict[str, Any]
) -> None:
    """Dynamic NTK too, which its own layers have one base for."""
    fields = PLAIN | {"model_type": family, "rope_scaling": scaling}
    assert differences(fields, length=8192)["vLLM"] == ""
    for n in (1, 8192, 9000):
        right = ENGINES["transformers"].rotations(ModelConfig.of(fields), n)[""]
        assert rotation(fields, n).like(right)
    own = differences(fields | {"model_type": "llama"}, length=8192)["vLLM"]
    assert bool(own) is (scaling is not OWN_YARN)


def test_gpt_oss_is_read_as_yarn_without_a_gain() -> None:
    fields = RELEASED["gpt-oss-20b"]
    usual = 0.1 * math.log(32) + 1
    for more in ({"attention_factor": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}):
        changed = fields | {"rope_scaling": fields["rope_scaling"] | more}
        assert rotation(changed).gain == pytest.approx(usual)
        assert differences(changed, length=4096)["vLLM"].startswith("scales logits by")
    with pytest.raises(NotServedError, match="takes this model with beta_fast alone"):
        rotation(fields | {"rope_scaling": OWN_YARN | {"beta_slow": 1.0}})


@pytest.mark.parametrize(
    ("family", "gain"), [("deepseek_v3", 1.0), ("minicpm3", 1.2), ("youtu", 1.2)]
)
def test_whose_latent_attention_reads_a_gain(family: str, gain: float) -> None:
    """Only DeepSeek's takes YaRN for its own, which reads ``mscale`` alone."""
    more = {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}
    fields = PLAIN | MLA | {"model_type": family, "rope_scaling": OWN_YARN | more}
    assert rotation(fields).gain == pytest.approx(gain)


def test_a_linear_scaling_of_latent_attention_is_taken_for_yarn() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    fields = PLAIN | MLA | {"model_type": "deepseek_v3", "rope_scaling": linear}
    with pytest.raises(NotServedError, match=f"linear scaling for YaRN and finds no {TRAINED}"):
        rotation(fields)
    yarn = rotation(fields | {"rope_scaling": OWN_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}})
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
    config = ModelConfig.of(PLAIN | {"model_type": "llama"} | fields)
    assert ENGINES["vLLM"].longest(config) == longest
