"""Rules of engines that convert a model before they serve it, against what their graphs have."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.engines import ENGINES, ModelConfig, differences, no_engine_has
from posenc.transformers.engines.config import NotServedError, UnreadError
from posenc.transformers.engines.onnxruntime_genai import MODELS, PHI3, REFUSED, UNREAD
from posenc.transformers.engines.openvino import EXPORTED, OLDER
from posenc.transformers.engines.rotation import EngineRotation
from tests.transformers.engines.released import RELEASED, TRAINED

pytest.importorskip("transformers")

GENAI, OPENVINO = "ONNX Runtime GenAI", "OpenVINO"
SIZES = {"num_attention_heads": 4, "hidden_size": 512, "max_position_embeddings": 8192}
BASE = {"rope_theta": 3e5, "head_dim": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 2048, "beta_fast": 32.0, "beta_slow": 1.0}
BARE = {"rope_type": "yarn", "factor": 4.0, TRAINED: 2048}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, TRAINED: 2048}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [1 + pair / 10 for pair in range(64)],
}
TYPED = LONG | {"type": "longrope"}
PHI = {TRAINED: 2048}


def rotation(engine: str, fields: dict[str, Any], length: int = 8192) -> EngineRotation:
    [found] = ENGINES[engine].rotations(ModelConfig.of(SIZES | BASE | fields), length).values()
    return found


@pytest.mark.parametrize(
    ("family", "scaling", "more", "pair_20", "slowest", "gain"),
    [
        ("llama", YARN, {}, 0.019427, 4.0594e-06, 1),
        ("llama", LINEAR, {}, 0.019427, 4.0594e-06, 1),
        ("llama", LLAMA3, {}, 0.019427, 5.0742e-07, 1),
        ("llama", LONG | {TRAINED: 2048, "factor": 4.0}, {}, 0.019427, 4.0594e-06, 1),
        ("llama", DYNAMIC, {}, 0.019427, 4.0594e-06, 1),
        ("nemotron", LINEAR, {"partial_rotary_factor": 0.5}, 0.0003774, 4.9435e-06, 1),
        ("smollm3", YARN, {}, 0.019427, 4.0594e-06, 1),
        ("qwen3", LINEAR, {}, 0.0097134, 2.0297e-06, 1),
        ("qwen3", YARN, {}, 0.012616, 1.0148e-06, 1.1386),
        ("qwen3", YARN | {"truncate": False}, {}, 0.012616, 1.0148e-06, 1.1386),
        ("qwen3", YARN | {"attention_factor": 1.0}, {}, 0.012616, 1.0148e-06, 1.1386),
        ("qwen3", YARN | {"mscale": 0.7}, {}, 0.012616, 1.0148e-06, 0.7),
        ("qwen3", YARN | {"mscale_all_dim": 1.3}, {}, 0.012616, 1.0148e-06, 1.1386),
        ("qwen3", YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, {}, 0.012616, 1.0148e-06, 0.92952),
        ("qwen2", YARN | {TRAINED: 1024}, {TRAINED: 2048}, 0.012616, 1.0148e-06, 1.1386),
        ("mistral", YARN, {}, 0.012616, 1.0148e-06, 1.1386),
        ("gpt_oss", YARN, {}, 0.012616, 1.0148e-06, 1.1386),
        ("gemma2", YARN, {}, 0.012616, 1.0148e-06, 1.1386),
        ("ernie4_5", LINEAR, {}, 0.0097134, 2.0297e-06, 1),
        ("phi", LINEAR, {"partial_rotary_factor": 0.5}, 0.0001887, 2.4718e-06, 1),
        ("phi3", TYPED, PHI, 0.0064756, 5.5608e-07, 1.0871),
        ("phi3", TYPED | {"attention_factor": 1.5}, PHI, 0.0064756, 5.5608e-07, 1.0871),
        ("phi3", TYPED | {"short_mscale": 1.1, "long_mscale": 1.3}, PHI, 0.0064756, 5.56e-07, 1.3),
        ("hunyuan_v1_dense", ALPHA, {}, 0.0021678, 4.0594e-09, 1),
        ("hunyuan_v1_dense", YARN, {}, 0.019427, 4.0594e-06, 1),
    ],
)  # fmt: skip
def test_cosines_of_the_graphs_of_genai(
    family: str,
    scaling: dict[str, Any],
    more: dict[str, Any],
    pair_20: float,
    slowest: float,
    gain: float,
) -> None:
    """Of its builder 0.18.0 with transformers 5.24: cosines and sines of position 1 in a graph."""
    found = rotation(GENAI, {"model_type": family, "rope_scaling": scaling} | more)
    assert found.frequencies[20] == pytest.approx(pair_20, rel=1e-4)
    assert found.frequencies[-1] == pytest.approx(slowest, rel=1e-3)
    assert found.gain == pytest.approx(gain, rel=1e-4)


def test_genai_takes_the_short_factors_up_to_the_trained_length() -> None:
    mscale = {"short_mscale": 1.1, "long_mscale": 1.3}
    fields = {"model_type": "phi3", "rope_scaling": TYPED | mscale} | PHI
    for length, slowest, gain in ((2048, 4.0594e-06, 1.1), (2049, 5.5608e-07, 1.3)):
        found = rotation(GENAI, fields, length)
        assert found.frequencies[-1] == pytest.approx(slowest, rel=1e-4)
        assert found.gain == gain


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3", {"rope_scaling": BARE}, "incomplete: 'beta_fast'"),
        ("qwen3", {"rope_scaling": BARE | {"beta_fast": 32.0}}, "incomplete: 'beta_slow'"),
        ("qwen3", {"rope_scaling": YARN | {TRAINED: 128}}, "within the pairs of a head"),
        ("qwen3", {"rope_scaling": YARN | {"beta_slow": 0.001}}, "within the pairs of a head"),
        ("qwen3", {"rope_scaling": TYPED | PHI}, "no longrope scaling of this model"),
        ("qwen3", {"rope_scaling": DYNAMIC}, "no dynamic scaling of this model"),
        ("mistral", {"rope_scaling": LLAMA3}, "no llama3 scaling of this model"),
        ("phi", {"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "rotate whole heads"),
        ("phi3", {"rope_scaling": LONG} | PHI, "longrope scaling is incomplete: 'type'"),
        ("phi3", PHI, "with LongRoPE just if"),
        ("phi3", {"rope_scaling": TYPED, TRAINED: 8192}, "with LongRoPE just if"),
        ("hunyuan_v1_dense", {"rope_scaling": DYNAMIC}, "incomplete: 'alpha'"),
        ("gpt_oss", {"rope_scaling": LINEAR}, "no linear scaling of this model, but yarn"),
        ("gemma3_text", {}, "one rope_type for all layers"),
        ("phimoe", PHI, "for GPUs alone"),
        ("gpt_neox", {}, "has no model gpt_neox"),
    ],
)
def test_what_genai_does_not_build(family: str, fields: dict[str, Any], reason: str) -> None:
    config = ModelConfig.of(SIZES | BASE | {"model_type": family} | fields)
    with pytest.raises(NotServedError, match=reason) as raised:
        ENGINES[GENAI].rotations(config, 8192)
    assert not isinstance(raised.value, UnreadError)


@pytest.mark.parametrize("engine", [GENAI, OPENVINO])
def test_models_of_images_are_not_compared(engine: str) -> None:
    """Their graphs have not been run."""
    told = differences(RELEASED["Gemma-3-4B"], length=131072)[engine]
    assert told.startswith("is not compared: ")


def test_the_longest_text_of_a_graph() -> None:
    """Its cosines end there; OpenVINO computes them."""
    config = ModelConfig.of(SIZES | BASE | {"model_type": "llama"})
    assert ENGINES[GENAI].longest(config) == 8192
    assert ENGINES[OPENVINO].longest(config) is None


@pytest.mark.parametrize("length", [1, 2048, 8192, 9000])
@pytest.mark.parametrize("scaling", [YARN, LINEAR, LLAMA3, YARN | {"attention_factor": 1.5}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "cohere"])
def test_openvino_traces_what_transformers_computes(
    family: str, scaling: dict[str, Any], length: int
) -> None:
    config = ModelConfig.of(SIZES | BASE | {"model_type": family, "rope_scaling": scaling})
    right = ENGINES["transformers"].rotations(config, length)
    assert ENGINES[OPENVINO].rotations(config, length) == right


@pytest.mark.parametrize("length", [1, 8192, 8193, 16384])
def test_openvino_keeps_the_base_of_the_short_text_that_was_traced(length: int) -> None:
    found = rotation(OPENVINO, {"model_type": "llama", "rope_scaling": DYNAMIC}, length)
    assert found.frequencies[-1] == pytest.approx(3e5 ** (-63 / 64))
    fields = SIZES | BASE | {"model_type": "llama", "rope_scaling": DYNAMIC}
    assert differences(fields, length=8192)[OPENVINO] == "ignores the scaling"
    alpha = {"model_type": "hunyuan_v1_dense", "rope_scaling": ALPHA}
    assert rotation(OPENVINO, alpha, length).frequencies[-1] == pytest.approx(4.0594e-09, 1e-4)


@pytest.mark.parametrize(
    ("more", "short", "long"),
    [
        ({}, 1.0871, 1.0871),
        ({"attention_factor": 1.5}, 1.5, 1.5),
        ({"attention_factor": 1.5, "short_mscale": 1.1, "long_mscale": 1.3}, 1.1, 1.3),
        ({"attention_factor": 1.5, "long_mscale": 1.3}, 1.5, 1.5),
    ],
)
def test_longrope_in_openvino(more: dict[str, float], short: float, long: float) -> None:
    """Both sides are traced, with a gain of each before the one of all."""
    fields = {"model_type": "phi3", "rope_scaling": LONG | more} | PHI
    for length, slowest, gain in ((2048, 4.0594e-06, short), (2049, 5.5608e-07, long)):
        found = rotation(OPENVINO, fields, length)
        assert found.frequencies[-1] == pytest.approx(slowest, rel=1e-4)
        assert found.gain == pytest.approx(gain, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "scaling", "reason"),
    [
        ("olmo2", LONG | PHI, "cannot trace the LongRoPE"),
        ("gpt_oss", LONG | PHI, "cannot trace the LongRoPE"),
        ("gemma2", LINEAR, "with transformers 5.0"),
        ("deepseek_v3", LINEAR, "with transformers 4.53"),
        ("seed_oss", LINEAR, "has no model seed_oss"),
    ],
)
def test_what_optimum_intel_does_not_export(
    family: str, scaling: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotServedError, match=reason):
        rotation(OPENVINO, {"model_type": family, "rope_scaling": scaling})


@pytest.mark.parametrize("family", ["cohere", "cohere2"])
def test_longrope_of_neighbouring_features_is_not_compared(family: str) -> None:
    """Logits of optimum-intel 2.2.0's export were off by 0.23 at 100 tokens, the others by 1e-5."""
    fields = SIZES | BASE | {"model_type": family, "rope_scaling": LONG | PHI}
    told = differences(fields, length=2048)[OPENVINO]
    assert told.startswith("is not compared: LongRoPE turns the two features")
    assert not differences(fields | {"rope_scaling": LINEAR}, length=8192)[OPENVINO]


def test_every_model_is_in_one_table() -> None:
    genai = [set(MODELS), {PHI3}, set(REFUSED), set(UNREAD)]
    for tables in (genai, [set(EXPORTED), set(OLDER)]):
        assert len(set().union(*tables)) == sum(map(len, tables))
        assert not any(no_engine_has(family) for family in set().union(*tables))


@pytest.mark.parametrize("family", ["persimmon", "qwen3_5_text", "ernie4_5"])
def test_models_of_their_tables_are_known_without_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("is_known", "has_model"):
        monkeypatch.setattr(f"posenc.transformers.engines.{known}", lambda name: False)
    monkeypatch.setattr("posenc.transformers.engines.NAMES", {})
    assert not no_engine_has(family)
    assert no_engine_has("bert")


def test_a_gain_by_the_names_that_genai_reads() -> None:
    """``mscale`` of which the quotient is it, as ``posenc extend`` writes a temperature."""
    every = {"mscale": 1.0, "mscale_all_dim": 2.0}
    gain = (0.1 * math.log(4) + 1) / (0.2 * math.log(4) + 1)
    fields = SIZES | BASE | {"model_type": "qwen3", "rope_scaling": YARN | every}
    for engine in ("transformers", GENAI, OPENVINO):
        [found] = ENGINES[engine].rotations(ModelConfig.of(fields), 1).values()
        assert found.gain == pytest.approx(gain)
