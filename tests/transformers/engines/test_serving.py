"""Methods that an engine serves, and what to type for it."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ArgumentError
from posenc.extension import EXTENSIONS, applicable
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.extend import Extended, extend_checkpoint, served_methods
from posenc.transformers.checkpoints import Fields
from posenc.transformers.engines import ENGINES, ModelConfig, differences, engine_named
from posenc.transformers.engines.serving import gguf_keys, overrides
from posenc.transformers.engines.vllm import PAST_COSINES
from posenc.transformers.live import LiveDecoder
from tests.support.tiny_models import tiny_model
from tests.transformers.engines.released import RELEASED, TRAINED
from tests.transformers.engines.test_extended import LENGTH, original

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a model") / "in"
    config = transformers.CONFIG_MAPPING["llama"](**original("llama", 64, 1.0))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def extended(source: Path, out: Path, engine: str, methods: str, factor: float = 4) -> Extended:
    options = {"methods": methods, "factor": factor, "engine": engine}
    return extend_checkpoint(source, out, **options, report=False)


@pytest.mark.parametrize("method", ["yarn", "interpolate", "ntk", "llama3"])
@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")]
)
def test_overrides_turn_the_original_into_the_extended_model(
    source: Path, tmp_path: Path, engine: str, option: str, method: str
) -> None:
    found = extended(source, tmp_path / "out", engine, method)
    [serving] = found.serving
    words = shlex.split(serving.original)
    assert str(source) in words
    assert words[-1] == str(4 * LENGTH)
    given = json.loads(words[words.index(option) + 1])
    before = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "out/config.json").read_text())
    rule = engine_named(engine)
    for n in (LENGTH, 4 * LENGTH):
        one, two = (
            rule.rotations(ModelConfig.of(fields), n)[""] for fields in (before | given, written)
        )
        assert one.like(two)
    assert rule.longest(ModelConfig.of(before | given)) == 4 * LENGTH
    assert f"{tmp_path / 'out'}" in serving.command


def test_overrides_are_nested_where_the_model_of_text_is() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2e6}
    text = original("llama", 64, 1.0, rope_parameters=parameters, **{TRAINED: 24})
    config = ModelConfig.of({"model_type": "llava", "text_config": text, TRAINED: 7})
    inside = {"rope_parameters": parameters, "max_position_embeddings": 99, TRAINED: 24}
    assert overrides(config, goal=99) == {"text_config": inside}
    assert config.ropes()[""].length == 24
    keys = gguf_keys(config, goal=99)
    assert keys["llama.context_length"] == (99, "uint32")


def test_keys_of_gguf(source: Path, tmp_path: Path) -> None:
    yarn, linear, base, ramp = (
        extended(source, tmp_path / method, "llama.cpp", method).serving[0]
        for method in ("yarn", "interpolate", "ntk", "llama3")
    )
    scaled = {"llama.context_length": (8192, "uint32")}
    scaled |= {"llama.rope.scaling.factor": (4.0, "float32")}
    assert linear.keys == scaled | {"llama.rope.scaling.type": ("linear", "string")}
    assert yarn.keys == scaled | {
        "llama.rope.scaling.type": ("yarn", "string"),
        "llama.rope.scaling.original_context_length": (2048, "uint32"),
    }
    assert base.keys["llama.rope.freq_base"][0] == pytest.approx(500000 * 4 ** (64 / 62))
    assert ramp.keys is None, "kept in a tensor of the converted file"
    assert "convert_hf_to_gguf.py" in ramp.command


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_a_temperature_is_a_key_of_gguf(source: Path, tmp_path: Path, gain: float) -> None:
    """Its loader multiplies YaRN's gain by ``attn_factor``: 0.1 · ln 4 + 1 by it is the wanted one.

    The converter writes no such key, so that the command sets it.
    """
    found = extended(source, tmp_path / "out", "llama.cpp", f"yarn@temperature={gain}").serving[0]
    value, kind = found.keys["llama.rope.scaling.attn_factor"]
    assert kind == "float32"
    assert value * (0.1 * math.log(4) + 1) == pytest.approx(gain, rel=1e-9)
    option = f"--override-kv llama.rope.scaling.attn_factor=float:{value:.9g}"
    assert found.command.endswith(f"llama-server -m model.gguf -c {4 * LENGTH} {option}")
    rule = ENGINES["llama.cpp"]
    config = ModelConfig.of(json.loads((tmp_path / "out/config.json").read_text()))
    for n in (1, LENGTH, 4 * LENGTH):
        right = ENGINES["transformers"].rotations(config, n)[""]
        served = rule.rotations(rule.with_options(config), n)[""]
        assert served.gain == pytest.approx(right.gain, rel=1e-6) == pytest.approx(gain)
        assert served.frequencies == pytest.approx(right.frequencies, rel=1e-6)
        assert not rule.rotations(config, n)[""].same_gain(right), "the folder alone"


def test_what_the_key_of_a_gain_does_not_serve() -> None:
    """With latent attention it also scales logits; usual gains and other scalings need none."""
    scaling = {"rope_type": "yarn", "factor": 4.0, TRAINED: 64}
    rule = ENGINES["llama.cpp"]
    usual = original("llama", 64, 1.0, rope_scaling=scaling)
    cold = {"attention_factor": 1.0}
    latent = RELEASED["DeepSeek-V3"]
    latent = latent | {"rope_scaling": latent["rope_scaling"] | {"mscale": 2.0}}
    linear = original("llama", 64, 1.0, rope_scaling={"rope_type": "linear", "factor": 4.0} | cold)
    for fields in (usual, latent, linear, original("gpt2", 64, 1.0)):
        config = ModelConfig.of(fields)
        assert rule.with_options(config) is config
    config = ModelConfig.of(original("llama", 64, 1.0, rope_scaling=scaling | cold))
    assert rule.with_options(config) is not config


@pytest.mark.parametrize(
    ("kind", "multiplied"), [("linear", True), ("dynamic", True), ("yarn", False)]
)
def test_scalings_that_multiply_the_longest_text_leave_it(kind: str, multiplied: bool) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    config = ModelConfig.of(original("llama", 64, 1.0, rope_parameters=parameters))
    given = overrides(config, goal=4 * LENGTH)
    assert ("max_position_embeddings" in given) != multiplied


def test_the_longest_text_of_llama3_has_its_factor() -> None:
    """Also where nothing says what the trained length was."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    config = ModelConfig.of(original("novel", 64, 1.0, rope_scaling=scaling))
    assert ENGINES["SGLang"].longest(config) == LENGTH


def test_an_architecture_that_is_not_known_is_left_to_the_reader() -> None:
    config = ModelConfig.of(original("llama", 64, 1.0) | {"model_type": "novel"})
    assert gguf_keys(config, goal=9) == {
        "ARCH.context_length": (9, "uint32"),
        "ARCH.rope.freq_base": (500000.0, "float32"),
    }


def test_only_methods_that_the_engine_serves_are_kept(source: Path, tmp_path: Path) -> None:
    found = extended(source, tmp_path / "out", "vllm", "dynamic_ntk,rerope,yarn")
    assert found.method == "yarn"
    past = f"is not compared: {PAST_COSINES}"
    left = {"dynamic_ntk": past, "rerope": "is known to no engine"}
    assert found.left_out == left
    assert differences(json.loads((tmp_path / "out/config.json").read_text()), length=LENGTH)


@pytest.mark.parametrize("engine", ENGINES)
def test_methods_without_words_in_a_config_are_named_for_every_engine(
    source: Path, engine: str
) -> None:
    """All that fit a model with RoPE; the others are held in ``test_extended``."""
    model = LiveDecoder.open(Fields.read(source), device="cpu")
    fitting = set(applicable(model.trained_encoding())) - {"direct"}
    methods = {name for name in fitting if not EXTENSIONS[name].claims.transformers}
    methods |= {"yarn+log_n"}
    assert {"rerope", "self_extend", "drope"} < methods
    parsed = [Method.parse(name) for name in (*sorted(methods), "ntk")]
    kept, left = served_methods(parsed, model, [ENGINES[engine]], factor=1.5, length=LENGTH)
    assert [method.spec for method in kept] == ["ntk"]
    assert left == dict.fromkeys(methods, "is known to no engine")


@pytest.mark.parametrize(
    ("engine", "method", "why", "near"),
    [
        ("vllm", "rerope", "is known to no engine", "yarn"),
        ("vllm", "longrope", "rotates texts up to the trained length as longer ones", "ntk"),
        ("llama.cpp", "dynamic_ntk", "ignores the scaling", "ntk_by_parts"),
        ("sglang", "yarn@temperature=1.0", "scales logits by 0.771 instead of 1", "yarn"),
        ("llama.cpp", "yarn@truncate=False", "rotates by other frequencies", "yarn"),
        ("mlx", "yarn@truncate=False", "rotates by other frequencies", "yarn"),
        ("transformers", "rerope", "is known to no engine", "yarn"),
        ("onnxruntime-genai", "yarn", "ignores the scaling", "llama3"),
        ("openvino", "dynamic_ntk", "ignores the scaling", "ntk_by_parts"),
    ],
)
def test_the_nearest_method_is_named(
    source: Path, tmp_path: Path, engine: str, method: str, why: str, near: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        extended(source, tmp_path / "out", engine, method)
    assert f"{method} {why}" in str(caught.value.got)
    assert caught.value.remedy == f"The nearest that it serves: {near}."
    assert not (tmp_path / "out").exists()


def test_several_engines_are_served_by_methods_of_all(source: Path, tmp_path: Path) -> None:
    found = extended(source, tmp_path / "out", "vllm,mlx, sglang", "longrope,dynamic_ntk,yarn")
    assert [one.engine for one in found.serving] == ["vLLM", "mlx-lm", "SGLang"]
    assert (found.method, set(found.left_out)) == ("yarn", {"longrope", "dynamic_ntk"})
    why = found.left_out["dynamic_ntk"]
    assert f"{PAST_COSINES} in vLLM" in why
    assert "mlx-lm" not in why, "which serves it"
    with pytest.raises(ArgumentError) as caught:
        extended(source, tmp_path / "none", "mlx,vllm", "dynamic_ntk")
    assert caught.value.expected == "one that mlx-lm and vLLM serve"
    assert "yarn" in str(caught.value.remedy) or "ntk" in str(caught.value.remedy)


@pytest.mark.parametrize("engine", [engine.option for engine in ENGINES.values()])
def test_every_engine_has_a_command(source: Path, tmp_path: Path, engine: str) -> None:
    out = tmp_path / "out of it"
    [found] = extended(source, out, engine, "ntk").serving
    assert str(out) in shlex.split(found.command)
    assert found.engine in ENGINES


def fields_of(found: Extended) -> Any:
    return json.loads((found.out / "config.json").read_text())


@pytest.mark.parametrize("method", ["yarn", "ntk"])
def test_mlx_serves_layers_of_several_types(tmp_path: Path, method: str) -> None:
    """By names beside their parameters, which the written folder has."""
    tiny_model("gemma3_text", max_position_embeddings=LENGTH).save_pretrained(tmp_path / "in")
    found = extended(tmp_path / "in", tmp_path / "out", "mlx", method)
    assert found.engines["mlx-lm"] == ""
    fields = fields_of(found)
    before, after = (
        ENGINES["transformers"].rotations(ModelConfig.of(f), LENGTH)
        for f in ({k: v for k, v in fields.items() if not k.startswith("rope_s")}, fields)
    )
    assert before == after
    engine = ENGINES["mlx-lm"].rotations(ModelConfig.of(fields), LENGTH)
    assert all(after[kind].like(rotation) for kind, rotation in engine.items())


def test_the_trained_length_goes_where_phi_3_reads_it(tmp_path: Path) -> None:
    fields = original("phi3", 64, 1.0, pad_token_id=0, **{TRAINED: LENGTH})
    config = transformers.CONFIG_MAPPING["phi3"](**fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    found = extended(tmp_path / "in", tmp_path / "out", "sglang", "ntk")
    given = overrides(ModelConfig.of(fields_of(found)), goal=4 * LENGTH)
    assert given[TRAINED] == LENGTH
