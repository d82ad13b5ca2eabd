"""Threads of 2025 and 2026 on scalings that engines read otherwise: a config, and the answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posenc.transformers.doctor.config_findings import findings
from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, compare, right_in_all
from posenc.transformers.engines.vllm import PAST_COSINES
from tests.transformers.engines.released import RELEASED, TRAINED, USUAL

pytest.importorskip("transformers")

IGNORED = "ignores the scaling"
OTHER = "rotates by other frequencies"


def served(fields: dict[str, Any], engine: str) -> EngineRotation:
    config = ModelConfig.of(fields)
    found = ENGINES[engine].rotations(config, config.longest or 0)
    return found.get("full_attention") or found[""]


def told(fields: dict[str, Any]) -> dict[str, str]:
    """Differences of ``USUAL`` engines."""
    found = {one.engine: one.difference for one in compare(fields)}
    return {engine: found[engine] for engine in USUAL if found[engine]}


def qwen3(**scaling: Any) -> dict[str, Any]:
    fields = RELEASED["Qwen3-8B, YaRN of its card"]
    return fields | {"rope_scaling": fields["rope_scaling"] | scaling}


def test_transformers_38224_the_factor_counts_beside_the_trained_length() -> None:
    usual, more = served(qwen3(), "transformers"), served(qwen3(factor=8.0), "transformers")
    assert usual.frequencies[-1] == pytest.approx(2 * more.frequencies[-1])
    assert more.gain == pytest.approx(0.1 * math.log(8) + 1)
    assert [f.field for f in findings(qwen3(factor=8.0), {}, None)] == ["max_position_embeddings"]


@pytest.mark.parametrize("engine", USUAL)
def test_megatron_6305_the_factor_is_not_lost(engine: str) -> None:
    assert served(qwen3(), engine).frequencies[-1] == pytest.approx(1e6 ** (-63 / 64) / 4)


def test_megatron_1418_the_ramp_is_of_the_trained_length() -> None:
    """Not of ``max_position_embeddings``, which is that of the extended model."""
    fields = RELEASED["DeepSeek-V3"]
    wrong = fields | {"rope_scaling": fields["rope_scaling"] | {TRAINED: 163840}}
    for engine in USUAL:
        assert not served(fields, engine).like(served(wrong, engine))


def test_vllm_56446_and_53634_the_longest_text_was_multiplied_again() -> None:
    """Until 0.33, which takes that of YaRN as it is stated."""
    scaling = {"rope_type": "deepseek_yarn", "factor": 40.0, TRAINED: 4096}
    fields = RELEASED["DeepSeek-V3"] | {"rope_scaling": scaling, "max_position_embeddings": 131072}
    found = {one.engine: one for one in compare(fields)}
    assert found["vLLM"].longest == 131_072
    unknown = "does not start: it knows no rope_type 'deepseek_yarn'"
    assert found["transformers"].difference == unknown
    named = fields | {"rope_scaling": scaling | {"rope_type": "yarn"}}
    assert {one.engine: one.longest for one in compare(named)}["vLLM"] == 131_072


@pytest.mark.parametrize("given", [1.0, 1.5])
def test_vllm_48351_and_mlx_lm_1507_attention_factor(given: float) -> None:
    """Laguna's 1.0 turns the gain off; three engines do not read it.

    The converter of llama.cpp writes it as ``yarn_attn_factor``, which only Grok's graph reads.
    """
    usual = 0.1 * math.log(4) + 1
    gains = {engine: served(qwen3(attention_factor=given), engine).gain for engine in USUAL}
    assert gains == pytest.approx(
        {"transformers": given, "vLLM": given, "SGLang": usual, "llama.cpp": usual, "mlx-lm": usual}
    )
    assert set(told(qwen3(attention_factor=given))) == {"SGLang", "llama.cpp", "mlx-lm"}


def test_vllm_48623_and_sglang_22711_mscale_of_ministral() -> None:
    """Without it every gain is 1.2773, 27 % too large."""
    fields = RELEASED["Ministral-3-8B"]
    assert {engine: served(fields, engine).gain for engine in USUAL} == dict.fromkeys(USUAL, 1)
    without = {k: v for k, v in fields["rope_parameters"].items() if not k.startswith("mscale")}
    lost = served(fields | {"rope_parameters": without}, "vLLM")
    assert lost.gain == pytest.approx(1.27726, 1e-5)


@pytest.mark.parametrize(
    ("position", "cosine"), [(0, 1.0), (1000, 0.959), (8192, 0.757), (20000, 0.619), (60000, 0.503)]
)
def test_mlx_vlm_1710_unscaled_is_right_at_position_0_alone(position: int, cosine: float) -> None:
    """Cosines of the thread's table, measured there on one random key."""
    fields = RELEASED["Llama-3.1-8B"]
    plain = {k: v for k, v in fields.items() if k != "rope_scaling"}
    right, wrong = (served(f, "transformers") for f in (fields, plain))
    assert right.agreement(wrong, position) == pytest.approx(cosine, abs=0.05)


def test_omlx_3347_yarn_of_qwen_3_5() -> None:
    """mlx-lm reads what other programs on MLX do not."""
    text = RELEASED["Qwen3.5"]["text_config"]
    yarn = {"rope_type": "yarn", "factor": 4.0, TRAINED: 262144}
    text = text | {"rope_parameters": text["rope_parameters"] | yarn}
    fields = {"model_type": "qwen3_5", "text_config": text | {"max_position_embeddings": 1048576}}
    assert told(fields) == {}
    assert len(served(fields, "mlx-lm").frequencies) == 32


def test_soup_793_a_scaling_without_a_base_in_transformers_5() -> None:
    """A saved ``rope_parameters`` alone loses base and scaling where they are read beside it."""
    fields = RELEASED["Llama-3.1-8B"]
    inside = {**fields["rope_scaling"], "rope_theta": fields["rope_theta"]}
    saved = {k: v for k, v in fields.items() if k not in ("rope_scaling", "rope_theta")}
    saved["rope_parameters"] = inside
    assert told(saved) == {"mlx-lm": "ignores base and scaling"}
    remedy = right_in_all(saved)
    assert not set(remedy.left) & set(USUAL)
    assert remedy.left["CTranslate2"] == IGNORED
    assert remedy.changes["rope_theta"] == 500000.0
    assert told(saved | dict(remedy.changes)) == {}


def test_unsloth_7028_an_override_without_the_base() -> None:
    """``rope_parameters`` without ``rope_theta`` keeps the one beside it, and says so elsewhere."""
    fields = RELEASED["Qwen3-8B"] | {"rope_parameters": {"rope_type": "default"}}
    assert served(fields, "transformers").frequencies[1] == pytest.approx(1e6 ** (-1 / 64))
    lost = {k: v for k, v in fields.items() if k != "rope_theta"}
    assert served(lost, "transformers").frequencies[1] == pytest.approx(1e4 ** (-1 / 64))
    reason = "does not start: config.json has no rope_theta beside the parameters"
    assert told(lost) == {"mlx-lm": reason}


def test_vllm_recipes_856_yarn_past_what_the_config_states() -> None:
    """All take the stated length; vLLM took factor times the trained one until 0.33."""
    fields = RELEASED["Qwen3-8B"] | {"rope_scaling": qwen3()["rope_scaling"]}
    found = {one.engine: one.longest for one in compare(fields)}
    assert found["vLLM"] == found["SGLang"] == found["llama.cpp"] == 40960


def test_safe_synthesizer_623_linear_factors_are_applied_to_the_longest_text() -> None:
    fields = RELEASED["Llama-2-7B"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    longest = {one.engine: one.longest for one in compare(fields)}
    assert longest["vLLM"] == longest["SGLang"] == 8192
    twice = {one.engine: one.longest for one in compare(fields | {"max_position_embeddings": 8192})}
    assert twice["vLLM"] == twice["SGLang"] == 16384


def test_exllamav3_259_a_lost_scaling_reads_well_and_means_nothing() -> None:
    fields = RELEASED["Qwen3-30B-A3B, YaRN"]
    found = {one.engine: one for one in compare(fields)}["mlx-lm"]
    assert found.difference == IGNORED
    assert found.agreement < 0.95
    assert "worse with each further one: at 131,072 tokens" in found.effect


def test_ik_llama_2003_the_interpolated_part_has_weight_one() -> None:
    """``ext_factor`` 64 instead of 1 would mix frequencies 64 times over."""
    found = served(qwen3(), "llama.cpp").frequencies
    assert min(found) == pytest.approx(1e6 ** (-63 / 64) / 4)
    assert max(found) == 1


def test_vllm_41277_and_sglang_have_one_base_for_all_lengths() -> None:
    fields = RELEASED["Llama-2-7B"] | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    past = f"is not compared: {PAST_COSINES}"
    assert told(fields) == {"vLLM": past, "SGLang": OTHER, "llama.cpp": IGNORED}
    base = 10000 * 3 ** (128 / 126)  # factor² − factor + 1
    assert served(fields, "SGLang").frequencies[-1] == pytest.approx(base ** (-63 / 64))


def test_llama_cpp_reads_llama_3s_trained_length_in_the_parameters() -> None:
    """Until 2026 beside them alone, and 8,192 for those in them."""
    fields = RELEASED["Llama-3.1-8B"]
    fields = fields | {"rope_scaling": fields["rope_scaling"] | {TRAINED: 4096}}
    assert told(fields) == {}
    assert not served(fields, "llama.cpp").like(served(RELEASED["Llama-3.1-8B"], "llama.cpp"))


def test_the_gain_that_is_the_usual_one_changes_nothing() -> None:
    assert right_in_all(RELEASED["Olmo-3-7B"]) is None


@pytest.mark.parametrize("family", ["stablelm", "glm", "falcon"])
def test_llama_cpp_converts_no_base_of_these(family: str) -> None:
    fields = RELEASED["Llama-2-7B"] | {"model_type": family, "rope_theta": 5e6}
    assert told(fields)["llama.cpp"] == "ignores base and scaling"
    longest = {one.engine: one.longest for one in compare(fields)}["llama.cpp"]
    assert longest == {"stablelm": 4096, "glm": 4096, "falcon": 2048}[family]


LINEAR = {"rope_type": "linear", "factor": 2.0}
TWICE = {"rope_type": "yarn", "factor": 2.0, TRAINED: 4096}


@pytest.mark.parametrize(
    ("family", "scaling", "expected"),
    [
        ("bitnet", LINEAR, IGNORED),
        ("nemotron", LINEAR, ""),
        ("nemotron", TWICE, "scales logits by 1 instead of 1.14"),
        ("qwen3", TWICE | {"beta_fast": 8.0}, OTHER),
        ("ministral3", LINEAR, "does not start"),
        ("cohere", LINEAR, IGNORED),
    ],
)
def test_what_the_converter_of_llama_cpp_makes_of_a_scaling(
    family: str, scaling: dict[str, Any], expected: str
) -> None:
    fields = RELEASED["Llama-2-7B"] | {"model_type": family, "rope_theta": 1e4}
    found = told(fields | {"rope_scaling": scaling}).get("llama.cpp", "")
    assert found.partition(":")[0] == expected


def test_llama_cpp_serves_the_short_factors_of_minicpm3_alone() -> None:
    """Its files tell no trained length; the released models were trained at their longest."""
    short, long = ([by] * 16 for by in (1.0, 4.0))
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    more = {"qk_rope_head_dim": 32, "rope_scaling": scaling | {TRAINED: 4096}}
    found = served(RELEASED["Llama-2-7B"] | {"model_type": "minicpm3"} | more, "llama.cpp")
    assert found.frequencies == pytest.approx([1e4 ** (-t / 16) for t in range(16)])
    assert found.gain == 1


def test_lines_go_where_the_model_of_text_is_described() -> None:
    text = RELEASED["Gemma-3-4B"]["text_config"]
    inside = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    beside = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    text = {k: v for k, v in text.items() if k not in beside} | {"rope_parameters": inside}
    fields = {"model_type": "gemma3", "text_config": text}
    assert told(fields) == {"mlx-lm": f"{IGNORED} in layers of full_attention"}
    remedy = right_in_all(fields)
    assert remedy.nested == "text_config"
    assert told({**fields, "text_config": {**text, **remedy.changes}}) == {}


def test_lines_of_null_are_kept_where_an_engine_needs_them() -> None:
    fields = RELEASED["Llama-2-7B"] | {"model_type": "exaone4", "rope_theta": 1e6}
    fields.pop("rope_scaling", None)
    assert list(told(fields)) == ["mlx-lm"]
    remedy = right_in_all(fields)
    assert remedy.changes["rope_scaling"] is None
    assert told(fields | dict(remedy.changes)) == {}


def test_windows_of_olmo_3_have_the_base_of_all_layers_in_llama_cpp() -> None:
    """Its graph rotates both by the base of the model."""
    fields = {k: v for k, v in RELEASED["Olmo-3-7B"].items() if k != "rope_scaling"}
    bases = {"full_attention": 2e6, "sliding_attention": 5e5}
    fields["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
    }
    assert "sliding_attention" in told(fields)["llama.cpp"]
    found = ENGINES["llama.cpp"].rotations(ModelConfig.of(fields), 1)
    assert found["sliding_attention"] == found["full_attention"]
    assert found["full_attention"].frequencies[1] == pytest.approx(2e6 ** (-1 / 64))


@pytest.mark.parametrize(
    ("family", "starts"),
    [("granite", False), ("granitemoe", False), ("smollm3", False), ("llama", True)],
)
def test_where_llama_cpp_takes_the_factors_of_llama_3(family: str, starts: bool) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, TRAINED: 1024}
    ramp = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = RELEASED["Llama-2-7B"] | {"model_type": family, "rope_scaling": scaling | ramp}
    assert told(fields).get("llama.cpp", "").startswith("does not start: ") != starts


def test_nothing_is_advised_where_nothing_helps() -> None:
    assert right_in_all(RELEASED["Phi-3-mini-128k"]) is None
    assert right_in_all(RELEASED["Qwen3-8B"]) is None
    assert right_in_all({"model_type": "bert", "hidden_size": 64}) is None


def test_vllm_serves_dynamic_ntk_of_a_told_trained_length() -> None:
    """By one base for all texts, the one that transformers has at the longest."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 1024}
    fields = RELEASED["Llama-2-7B"] | {"rope_scaling": scaling}
    base = 10000 * 7 ** (128 / 126)  # 2 · 4096 / 1024 - 1
    assert served(fields, "vLLM").frequencies[-1] == pytest.approx(base ** (-63 / 64))


NEEDS_TYPE = "does not start: it takes a scaling of this model with factor and type"
INSIDE = {"rope_type": "yarn", "factor": 4.0, TRAINED: 32768, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("qwen3", {"rope_parameters": INSIDE}, ""),
        ("qwen2", {"rope_parameters": INSIDE, "rope_theta": 1e6}, IGNORED),
        ("granitemoehybrid", {"rope_parameters": {"rope_theta": 2e6}, "rope_theta": 1e4}, ""),
        ("granitemoehybrid", {"rope_scaling": INSIDE, "rope_theta": 1e6}, IGNORED),
        ("nemotron", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ""),
        ("nemotron", {"rope_scaling": LINEAR}, NEEDS_TYPE),
        ("llama4_text", RELEASED["Llama-4-Scout"]["text_config"], IGNORED),
    ],
)
def test_where_mlx_lm_reads_a_scaling(family: str, more: dict[str, Any], expected: str) -> None:
    usual = {"num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 131072}
    assert told({"model_type": family, **usual, **more}).get("mlx-lm", "") == expected


@pytest.mark.parametrize("family", ["cohere", "cohere2"])
def test_llama_cpp_scales_no_command_r(family: str) -> None:
    fields = RELEASED["Command R7B"] | {"model_type": family, "rope_scaling": INSIDE}
    assert told(fields)["llama.cpp"] == IGNORED


def test_broken_configs_are_told_not_raised() -> None:
    sizes = {"max_position_embeddings": 64, "hidden_size": 64, "num_attention_heads": 4}
    odd = {"rope_theta": 1e4, "rope_scaling": {"type": "odd"}, **sizes}
    strange = [{"model_type": "strange", "rope_theta": "ten"}, {"model_type": "strange", **odd}]
    scalings = ({"rope_type": "yarn"}, {"rope_type": "longrope", "factor": 2}, [1])
    scaled = [{"model_type": "llama", "rope_scaling": scaling} for scaling in scalings]
    for fields in ({}, {"model_type": "llama"}, *strange, *scaled):
        for one in compare(fields):
            assert one.rotations or one.difference.startswith("does not start: "), fields


def test_lines_leave_transformers_rotation_alone() -> None:
    """Lines are kept only if the base of windows and that of full layers stay."""
    yarn = {"rope_type": "yarn", "factor": 8.0, TRAINED: 8192, "rope_theta": 5e5}
    windows = {"rope_type": "default", "rope_theta": 1e4}
    fields = {k: v for k, v in RELEASED["Olmo-3-7B"].items() if k not in ("rope_scaling",)}
    fields["rope_parameters"] = {"full_attention": yarn, "sliding_attention": windows}
    assert "mlx-lm" in told(fields)
    remedy = right_in_all(fields)
    changed = fields | dict(remedy.changes if remedy else {})
    before, after = (
        ENGINES["transformers"].rotations(ModelConfig.of(f), 1) for f in (fields, changed)
    )
    assert before == after


def test_lines_that_engines_agree_on_but_change_the_rotation_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = RELEASED["Qwen3-30B-A3B"] | {"rope_scaling": qwen3()["rope_scaling"]}
    assert IGNORED in told(fields).values()
    plain = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert not told(fields | plain)
    ways = "posenc.transformers.engines._candidates"
    monkeypatch.setattr(ways, lambda config: iter([plain]))
    assert right_in_all(fields) is None


def test_the_trained_length_beside_the_parameters_of_a_model_that_transformers_lacks() -> None:
    fields = qwen3() | {"model_type": "novel", TRAINED: 4096}
    fields["rope_scaling"] = {k: v for k, v in fields["rope_scaling"].items() if k != TRAINED}
    assert ModelConfig.of(fields).ropes()[""].length == 4096
