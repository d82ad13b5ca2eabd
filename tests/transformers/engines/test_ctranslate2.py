"""Rules of CTranslate2, against what its release did with small models by transformers 5.24."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posenc.errors import ArgumentError
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers.engines import ENGINES, ModelConfig, compare, differences
from posenc.transformers.engines.config import NotServedError, UnreadError
from posenc.transformers.engines.ctranslate2 import LOADERS, OUTDATED
from posenc.transformers.engines.rotation import EngineRotation
from tests.transformers.engines.released import RELEASED, TRAINED

pytest.importorskip("transformers")

IGNORED = "ignores the scaling"
BASE_TOO = "ignores base and scaling"

SIZES = {"num_attention_heads": 2, "hidden_size": 128, "max_position_embeddings": 512}
BASE = {"rope_theta": 5e5}
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    TRAINED: 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, TRAINED: 128}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "factor": 4.0,
    TRAINED: 128,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def rotations(fields: dict[str, Any], length: int = 512) -> dict[str, EngineRotation]:
    return ENGINES["CTranslate2"].rotations(ModelConfig.of(SIZES | fields), length)


def usual(base: float, factor: float = 1.0, width: int = 64) -> list[float]:
    return [base ** (-2 * pair / width) / factor for pair in range(width // 2)]


@pytest.mark.parametrize(
    ("family", "fields", "base", "factor"),
    [
        ("llama", BASE, 5e5, 1),
        ("llama", BASE | {"rope_scaling": LINEAR}, 5e5, 4),
        ("llama", BASE | {"rope_scaling": LLAMA3}, 5e5, 1),
        ("llama", BASE | {"partial_rotary_factor": 0.5}, 5e5, 1),
        ("llama", {"rope_parameters": LINEAR | BASE | {"rope_type": "linear"}}, 5e5, 4),
        ("llama", {"rope_parameters": {"rope_type": "default"} | BASE}, 5e5, 1),
        ("mistral", BASE | {"rope_scaling": LINEAR}, 5e5, 4),
        ("qwen2", BASE | {"rope_scaling": LINEAR}, 5e5, 4),
        ("qwen3", BASE | {"rope_scaling": LINEAR, "head_dim": 64}, 5e5, 4),
        ("gemma", BASE | {"head_dim": 64}, 1e4, 1),
        ("gemma", BASE | {"rope_scaling": YARN, "head_dim": 64}, 1e4, 1),
        ("gemma2", BASE | {"rope_scaling": LINEAR, "head_dim": 64}, 1e4, 1),
        ("falcon", BASE | {"rope_scaling": DYNAMIC, "alibi": False}, 1e4, 1),
    ],
)
@pytest.mark.parametrize("length", [128, 512])
def test_frequencies_as_its_logits_have_them(
    family: str, fields: dict[str, Any], base: float, factor: float, length: int
) -> None:
    """Of 4.8.5: logits of small models are those of transformers with these to 1e-4."""
    [found] = rotations({"model_type": family} | fields, length).values()
    assert found.frequencies == pytest.approx(usual(base, factor))
    assert found.gain == 1


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma"])
def test_heads_of_a_size_of_their_own(family: str) -> None:
    [found] = rotations({"model_type": family, "head_dim": 32} | BASE).values()
    assert found.frequencies == pytest.approx(usual(1e4 if family == "gemma" else 5e5, width=32))


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_gemma_3_always_has_its_released_bases_and_no_scaling(
    scaling: dict[str, Any] | None,
) -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    bases = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    text = SIZES | bases | kinds | {"head_dim": 64, "model_type": "gemma3_text"}
    text["rope_scaling"] = scaling
    for fields in (text, {"model_type": "gemma3", "text_config": text}):
        found = rotations(fields)
        assert found["full_attention"].frequencies == pytest.approx(usual(1e6))
        assert found["sliding_attention"].frequencies == pytest.approx(usual(1e4))
    lost = differences(text, length=512)["CTranslate2"]
    assert lost == f"{BASE_TOO} in layers of sliding_attention"


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"rope_scaling": YARN}, "knows no yarn scaling"),
        ("llama", {"rope_scaling": DYNAMIC}, "knows no dynamic scaling"),
        ("llama", {"rope_scaling": LONG}, "knows no longrope scaling"),
        ("mistral", {"rope_scaling": LLAMA3}, "knows no llama3 scaling"),
        ("qwen2", {"rope_scaling": LLAMA3}, "knows no llama3 scaling"),
        ("qwen3", {"rope_scaling": LLAMA3 | {"rope_type": "longrope"}}, "knows no longrope"),
        ("llama", {"head_dim": 32}, "heads of hidden_size / num_attention_heads features alone"),
        ("qwen2", {"head_dim": 128}, "heads of hidden_size / num_attention_heads features alone"),
        ("gpt_neox", {}, "does not read this model as transformers 5 has it"),
        ("phi", {}, "does not read this model as transformers 5 has it"),
        ("phi3", {}, "does not read this model as transformers 5 has it"),
        ("gemma4_text", {}, "does not read this model as transformers 5 has it"),
        ("cohere", {}, "has no model cohere"),
        ("mixtral", {}, "has no model mixtral"),
    ],
)
def test_what_it_does_not_convert(family: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotServedError, match=reason) as raised:
        rotations({"model_type": family} | BASE | fields)
    assert not isinstance(raised.value, UnreadError)


def test_the_model_at_the_top_counts() -> None:
    """Its converter looks for the class of the whole config, not for that of its text."""
    text = SIZES | BASE | {"model_type": "llama"}
    with pytest.raises(NotServedError, match="has no model llava"):
        rotations({"model_type": "llava", "text_config": text})


def test_families_are_in_one_table() -> None:
    assert not OUTDATED & LOADERS.keys()


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("Llama-3.1-8B", IGNORED),
        ("Qwen3-8B", ""),
        ("Qwen3-8B, YaRN of its card", "its converter knows no yarn scaling of this model"),
        ("Phi-3-mini-128k", "its converter does not read this model"),
        ("Gemma-4", "its converter does not read this model"),
        ("Command R", "its converter has no model cohere"),
        ("DeepSeek-V3", "its converter has no model deepseek_v3"),
    ],
)
def test_released_models(name: str, difference: str) -> None:
    [found] = [one for one in compare(RELEASED[name]) if one.engine == "CTranslate2"]
    assert difference in found.difference
    assert bool(found.difference) is bool(difference)
    assert found.longest is None


def test_a_base_of_gemma_is_lost_from_the_first_tokens_on() -> None:
    fields = SIZES | {"model_type": "gemma", "head_dim": 64, "rope_theta": 1e6}
    [found] = [one for one in compare(fields) if one.engine == "CTranslate2"]
    assert found.difference == BASE_TOO
    assert found.effect.startswith("wrong from the first tokens on")
    assert differences(fields | {"rope_theta": 1e4}, length=512)["CTranslate2"] == ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    sizes = SIZES | {"intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**(sizes | {"max_position_embeddings": 128}))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["interpolate", "ntk"])
def test_the_command_that_converts_it(source: Path, method: str, tmp_path: Path) -> None:
    out = tmp_path / "of four"
    given = {"methods": method, "factor": 4.0, "report": False}
    found = extend_checkpoint(source, out, engine="ctranslate2", **given)
    assert found.engines["CTranslate2"] == ""
    [serving] = found.serving
    command = f"ct2-transformers-converter --model '{out}' --output_dir model-ct2"
    assert (serving.engine, serving.command, serving.original) == ("CTranslate2", command, "")


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("llama3", IGNORED),
        ("ntk_by_parts", IGNORED),
        ("yarn", "knows no yarn scaling"),
        ("longrope", "knows no longrope scaling"),
        ("dynamic_ntk", "knows no dynamic scaling"),
    ],
)
def test_methods_that_it_loses_or_refuses(
    source: Path, method: str, reason: str, tmp_path: Path
) -> None:
    given = {"methods": method, "factor": 4.0, "report": False}
    with pytest.raises(ArgumentError) as caught:
        extend_checkpoint(source, tmp_path / "out", engine="ctranslate2", **given)
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()
