"""Configs of released models in each engine."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any

import pytest
import torch

from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, compare, differences
from tests.transformers.engines.released import RELEASED, SOURCES, TRAINED, USUAL

transformers = pytest.importorskip("transformers")

AS_LONGER = "rotates texts up to the trained length as longer ones"
LONG = {"vLLM": AS_LONGER, "llama.cpp": AS_LONGER, "mlx-lm": AS_LONGER}
WHOLE_PAIRS = dict.fromkeys(("llama.cpp", "mlx-lm"), "rotates by other frequencies")

DIFFERENT: dict[str, dict[str, str]] = {
    "Qwen3-30B-A3B, YaRN": {"mlx-lm": "ignores the scaling"},
    "Phi-3-mini-128k": LONG,
    "Phi-3.5-mini": LONG,
    "Phi-4-mini": LONG,
    "gpt-oss-20b": WHOLE_PAIRS,
    "gpt-oss-120b": WHOLE_PAIRS,
    "GLM-4-9B": {
        "llama.cpp": "ignores base and scaling",
        "mlx-lm": "rotates 128 features of a head instead of 64",
    },
    "Kimi-K2": {"llama.cpp": "rotates by other frequencies"},
}
"""Engines that rotate these otherwise than transformers does; no others differ."""

OTHER_LENGTHS: dict[str, dict[str, int]] = {
    "Command R": dict.fromkeys(("vLLM", "SGLang", "llama.cpp"), 131072),
    "DeepSeek-Coder-6.7B": {"vLLM": 65536, "SGLang": 65536},
    "GLM-4-9B": {"llama.cpp": 4096},
    **{name: {"vLLM": 4096} for name in ("Phi-3-mini-128k", "Phi-3.5-mini", "Phi-4-mini")},
}
"""Longest texts that are not those of ``max_position_embeddings``."""


def length_of(config: ModelConfig) -> int:
    return min(rope.length for rope in config.ropes().values())


def rotary(fields: dict[str, Any]) -> Any:
    """The rotary module of transformers."""
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))
    config = config.get_text_config()
    place = type(config).__module__.replace("configuration_", "modeling_")
    for name, found in vars(importlib.import_module(place)).items():
        if name.endswith("RotaryEmbedding") and "Vision" not in name and found.__module__ == place:
            return found(config=config)
    raise AssertionError(place)


def test_there_are_sixty() -> None:
    assert len(RELEASED) >= 60
    assert set(DIFFERENT) | set(OTHER_LENGTHS) <= set(RELEASED)


def test_every_config_has_one_source_or_is_told_to_have_none() -> None:
    named = [name for names in SOURCES.values() for name in names]
    assert sorted(named) == sorted(RELEASED)
    assert len(SOURCES[""]) <= 5
    assert len(named) - len(SOURCES[""]) >= 60


@pytest.mark.parametrize("name", RELEASED)
def test_transformers_rotates_by_its_rules(name: str) -> None:
    module, config = rotary(RELEASED[name]), ModelConfig.of(RELEASED[name])
    found = ENGINES["transformers"].rotations(config, 1)
    assert found
    for kind, rotation in found.items():
        prefix = f"{kind}_" if kind else ""
        theta = getattr(module, f"{prefix}inv_freq").double().flatten().tolist()
        assert rotation.frequencies == pytest.approx(theta, rel=1e-6, abs=1e-30), kind
        assert rotation.gain == pytest.approx(getattr(module, f"{prefix}attention_scaling"), 1e-6)


@pytest.mark.parametrize(
    "name", [n for n in RELEASED if n.startswith("Phi-3") or n == "Phi-4-mini"]
)
def test_transformers_turns_to_long_factors_past_the_trained_length(name: str) -> None:
    module, config = rotary(RELEASED[name]), ModelConfig.of(RELEASED[name])
    length = length_of(config)
    for last in (length - 1, length):
        module(torch.empty(1, 1, 1), torch.tensor([[last]]))
        rotation = ENGINES["transformers"].rotations(config, last + 1)[""]
        assert rotation.frequencies == pytest.approx(module.inv_freq.tolist(), rel=1e-6)


@pytest.mark.parametrize("name", RELEASED)
def test_engines_agree_to_1e_6_or_are_named(name: str) -> None:
    config = ModelConfig.of(RELEASED[name])
    length = length_of(config)
    told = differences(config, length=length)
    assert set(told) == set(ENGINES) - {"transformers"}
    assert {k: told[k] for k in USUAL[1:] if told[k]} == DIFFERENT.get(name, {})
    for n in (length, length + 1, 2 * length):
        right = ENGINES["transformers"].rotations(config, n)
        for engine, difference in told.items():
            if difference:
                continue
            served = ENGINES[engine].rotations(config, n)
            for kind, rotation in right.items():
                assert served[kind].gain == pytest.approx(rotation.gain, rel=1e-6)
                assert served[kind].frequencies == pytest.approx(
                    rotation.frequencies, rel=1e-6, abs=1e-30
                )


@pytest.mark.parametrize("name", RELEASED)
def test_the_longest_text(name: str) -> None:
    config = ModelConfig.of(RELEASED[name])
    usual = dict.fromkeys(("transformers", "vLLM", "SGLang", "llama.cpp"), config.longest)
    expected = usual | {"mlx-lm": None} | OTHER_LENGTHS.get(name, {})
    found = {one.engine: one.longest for one in compare(config)}
    assert {engine: found[engine] for engine in expected} == expected


def ramp(theta: float, width: int, trained: int, factor: float, *, whole: bool) -> list[float]:
    """YaRN's frequencies, written from the paper (beta 32 and 1)."""
    ends = [
        width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (32, 1)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if whole else ends
    found = []
    for pair in range(width // 2):
        fast = theta ** (-2 * pair / width)
        slow_part = min(max((pair - low) / (high - low), 0), 1)
        found.append(fast / factor * slow_part + fast * (1 - slow_part))
    return found


@pytest.mark.parametrize("engine", USUAL)
def test_gpt_oss_by_the_paper(engine: str) -> None:
    whole = engine in ("llama.cpp", "mlx-lm")
    found = ENGINES[engine].rotations(ModelConfig.of(RELEASED["gpt-oss-20b"]), 1)[""]
    assert found.frequencies == pytest.approx(ramp(150000, 64, 4096, 32, whole=whole), rel=1e-6)
    assert found.gain == pytest.approx(0.1 * math.log(32) + 1)


@pytest.mark.parametrize("engine", USUAL)
def test_llama_3_by_wavelengths(engine: str) -> None:
    expected = []
    for pair in range(64):
        theta = 500000 ** (-pair / 64)
        wave = 2 * math.pi / theta
        kept = (8192 / wave - 1) / 3
        if wave < 8192 / 4:
            expected.append(theta)
        elif wave > 8192:
            expected.append(theta / 8)
        else:
            expected.append((1 - kept) * theta / 8 + kept * theta)
    found = ENGINES[engine].rotations(ModelConfig.of(RELEASED["Llama-3.1-8B"]), 1)[""]
    assert found.frequencies == pytest.approx(expected, rel=1e-6)
    assert found.gain == 1


@pytest.mark.parametrize("engine", USUAL)
@pytest.mark.parametrize("length", [4096, 4097])
def test_phi_3_by_its_factors(engine: str, length: int) -> None:
    fields = RELEASED["Phi-3-mini-128k"]
    long = length > 4096 or engine in ("vLLM", "llama.cpp", "mlx-lm")
    factors = fields["rope_scaling"]["long_factor" if long else "short_factor"]
    found = ENGINES[engine].rotations(ModelConfig.of(fields), length)[""]
    expected = [10000 ** (-pair / 48) / factor for pair, factor in enumerate(factors)]
    assert found.frequencies == pytest.approx(expected, rel=1e-6)
    assert found.gain == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


@pytest.mark.parametrize("engine", USUAL)
def test_gemma_4_rests_three_quarters_of_its_full_layers(engine: str) -> None:
    found = ENGINES[engine].rotations(ModelConfig.of(RELEASED["Gemma-4"]), 1)
    expected = [1e6 ** (-pair / 256) for pair in range(64)] + [0.0] * 192
    assert found["full_attention"].frequencies == pytest.approx(expected, rel=1e-6)
    expected = [1e4 ** (-pair / 128) for pair in range(128)]
    assert found["sliding_attention"].frequencies == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("engine", USUAL)
def test_deepseek_has_no_gain_beside_its_scale(engine: str) -> None:
    for name in ("DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2"):
        found = ENGINES[engine].rotations(ModelConfig.of(RELEASED[name]), 1)[""]
        assert found.gain == 1
        assert len(found.frequencies) == 32


HUNYUAN = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}


def hunyuan(family: str, longest: int = 32768, **scaling: Any) -> dict[str, Any]:
    """A config of its kind, with 32 heads of 128."""
    sizes = {"num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128, "rope_theta": 1e4}
    fields = {"model_type": family, "max_position_embeddings": longest}
    return fields | sizes | {"rope_scaling": HUNYUAN | scaling}


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
@pytest.mark.parametrize("engine", USUAL)
def test_hunyuan_has_one_base_for_all_texts(engine: str, family: str) -> None:
    """10,000 · 1,000^(128/126), whatever the length."""
    fields = hunyuan(family)
    config, module = ModelConfig.of(fields), rotary(fields)
    if (engine, family) == ("mlx-lm", "hunyuan_v1_moe"):
        assert "has no model" in differences(config, length=32768)[engine]
        return
    base = 1e4 * 1000 ** (128 / 126)
    for n in (1, 32768, 100000):
        found = ENGINES[engine].rotations(config, n)[""]
        assert found.frequencies == pytest.approx(module.inv_freq.tolist(), rel=1e-6)
        assert found.frequencies[63] == pytest.approx(base ** (-126 / 128), rel=1e-6)
        assert found.gain == 1
    longest = {one.engine: one.longest for one in compare(config)}
    assert longest["llama.cpp"] == 262144
    assert longest["vLLM"] == longest["SGLang"] == 32768


def test_hunyuan_outside_of_what_converters_take() -> None:
    """llama.cpp's asserts the released base and lengths, of the mixture ``alpha`` too."""
    dense, moe = "hunyuan_v1_dense", "hunyuan_v1_moe"
    for fields, starts in (
        (hunyuan(dense, alpha=50.0), True),
        (hunyuan(dense, 262144), True),
        (hunyuan(dense, 65536), False),
        (hunyuan(dense) | {"rope_theta": 5e4}, False),
        (hunyuan(moe, alpha=50.0), False),
    ):
        told = differences(fields, length=32768)
        assert bool(told["llama.cpp"]) is not starts
        assert not told["vLLM"]
    del (fields := hunyuan(dense))["rope_scaling"]["factor"]
    assert "alpha, factor and type" in differences(fields, length=32768)["mlx-lm"]
    other = hunyuan(dense) | {"model_type": "llama"}
    assert differences(other, length=32768)["vLLM"], "of other families transformers reads no alpha"


STEP = {
    "model_type": "step3p5", "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
    "hidden_size": 256, "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 64,
    "max_position_embeddings": 262144, "sliding_window": 512,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "rope_theta": [5e6, 1e4, 5e6, 1e4, 5e6], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 0.5],
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, TRAINED: 131072, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
}  # fmt: skip
"""Of the form of Step 3.5, with a base and a rotated share for each layer."""


@pytest.mark.parametrize("engine", USUAL)
def test_step_has_bases_by_layer_and_scales_full_ones(engine: str) -> None:
    served = ENGINES[engine].rotations(ModelConfig.of(STEP), 262144)
    assert served["sliding_attention"].frequencies == pytest.approx(
        [1e4 ** (-pair / 32) for pair in range(32)]
    )
    assert len(served["full_attention"].frequencies) == 16
    assert served["full_attention"].frequencies[15] == pytest.approx(5e6 ** (-15 / 16) / 2)
    every = ENGINES[engine].rotations(ModelConfig.of(STEP | {"yarn_only_types": None}), 262144)
    slowest = 1e4 ** (-31 / 32)
    scaled = every["sliding_attention"].frequencies[31]
    assert scaled == pytest.approx(slowest) if engine != "mlx-lm" else scaled < 0.99 * slowest
    halved = every["full_attention"].frequencies[15] / served["full_attention"].frequencies[15]
    assert halved == pytest.approx(2 if engine == "SGLang" else 1), "SGLang scales no type unnamed"


def test_step_as_transformers_5_saves_it() -> None:
    """By layer type, which vLLM reads, and not the lists that others need or have a default for."""
    saved = ModelConfig.of(STEP).completed
    fields = {k: v for k, v in STEP.items() if not k.startswith(("rope", "partial", "yarn"))}
    fields["rope_parameters"] = saved["rope_parameters"]
    found = differences(fields, length=131072)
    assert found["vLLM"] == ""
    assert found["SGLang"] == "does not start: config.json has no rope_theta of each layer"
    assert found["mlx-lm"].startswith("rotates 64 features of a head instead of 32 in layers")


def test_agreement_is_the_cosine_of_a_rotated_key() -> None:
    one, two = EngineRotation((1.0, 0.5, 0.0)), EngineRotation((0.9, 0.5))
    assert one.agreement(two, 10) == pytest.approx((math.cos(1.0) + 2) / 3)
    assert one.agreement(one, 10**6) == 1
