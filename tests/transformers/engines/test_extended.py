"""Extended checkpoints rotate alike in every engine, or the difference is told."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import create
from posenc.encodings.query_key.rope import Rope
from posenc.extension import EXTENSIONS, extend
from posenc.extension.varying import VaryingRope
from posenc.lab.evaluation.extend import extend_checkpoint
from posenc.transformers.checkpoints import FIELD, TRAINED
from posenc.transformers.engines import ENGINES, EngineRotation, ModelConfig, differences
from posenc.transformers.engines.config import UnreadError
from posenc.transformers.engines.vllm import PAST_COSINES
from tests.support.exhaustive import in_turn
from tests.transformers.engines.released import USUAL

transformers = pytest.importorskip("transformers")

LENGTH = 2048

IGNORED = "ignores the scaling"
PAST = f"is not compared: {PAST_COSINES}"
BASE_TOO = "ignores base and scaling"
AS_LONGER = "rotates texts up to the trained length as longer ones"
OTHER = "rotates by other frequencies"
GAIN = "scales logits by "
"""Start of the words for another gain."""

METHODS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("interpolate", {}, {}),
    ("ntk", {}, {}),
    ("ntk_by_parts", {}, {}),
    ("ntk_by_parts", {"alpha": 0.5, "beta": 4.0}, {}),
    ("ntk_by_parts", {"alpha": 0.0, "beta": 4.0}, {"llama.cpp": IGNORED}),
    ("llama3", {}, {}),
    ("llama3", {"low": 0.0}, {"llama.cpp": IGNORED}),
    ("yarn", {}, {}),
    ("yarn", {"alpha": 0.5, "beta": 4.0}, {"llama.cpp": OTHER}),
    ("yarn", {"temperature": 1.0}, {"SGLang": GAIN, "llama.cpp": GAIN}),
    ("yarn", {"temperature": 1.4}, {"SGLang": GAIN, "llama.cpp": GAIN}),
    ("yarn", {"truncate": False}, {"llama.cpp": OTHER, "mlx-lm": OTHER}),
    ("longrope", {}, {"vLLM": AS_LONGER, "mlx-lm": AS_LONGER, "llama.cpp": IGNORED}),
    ("clipped", {}, {"llama.cpp": IGNORED}),
    ("riflex", {"repeats": 700.0}, {"llama.cpp": IGNORED}),
    ("dynamic_ntk", {}, {"vLLM": PAST, "SGLang": OTHER, "llama.cpp": IGNORED}),
]
"""Methods with options, and what engines other than transformers do with a Llama so extended."""

SHAPES: list[tuple[str, int, float, float]] = [
    ("llama", 16, 1.0, 2),
    ("llama", 128, 1.0, 8),
    ("mistral", 96, 1.0, 4),
    ("qwen2", 64, 1.0, 8),
    ("gpt_neox", 64, 0.25, 4),
    ("gpt_neox", 80, 0.5, 2),
]
"""Families, head sizes, rotated shares and factors."""


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def original(family: str, width: int, share: float, **fields: Any) -> dict[str, Any]:
    """Fields of a small model with one head of this width."""
    sizes = {"vocab_size": 8, "hidden_size": width, "head_dim": width, "intermediate_size": 8}
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config = {"model_type": family, "hidden_act": "silu", **sizes, **counts}
    config["max_position_embeddings"] = LENGTH
    if family == "gpt_neox":
        config |= {"rotary_pct": share, "rotary_emb_base": 10000, "hidden_act": "gelu"}
    else:
        config |= {"rope_theta": 500000.0}
    if family == "mistral":
        config["sliding_window"] = None
    return config | fields


def stretched(
    config: dict[str, Any], folder: Path, method: str, options: dict[str, Any], factor: float
) -> tuple[dict[str, Any], Rope | VaryingRope]:
    """The written fields, and the extended encoding."""
    base = config.get("rotary_emb_base") or config["rope_theta"]
    share = config.get("rotary_pct", 1.0)
    rope = create("rope", head_dim=config["head_dim"], base=base, fraction=share)
    if "rope_scaling" in config:  # linear
        rope = extend(rope, "interpolate", factor=config["rope_scaling"]["factor"])
    extended = extend(rope, method, factor=factor, length=LENGTH, **options)
    (folder / "in").mkdir(parents=True)
    (folder / "in/config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder / "in")
    transformers.AutoModelForCausalLM.from_config(read).save_pretrained(folder / "in")
    spec = "@".join([method, *(f"{name}={value}" for name, value in options.items())])
    given = {"methods": spec, "factor": factor, "trained_length": LENGTH, "report": False}
    extend_checkpoint(folder / "in", folder / "out", **given)
    return json.loads((folder / "out/config.json").read_text()), extended.query_key


def rotation(part: Rope | VaryingRope, length: int) -> EngineRotation:
    """An encoding in a text of ``length`` tokens."""
    like = torch.empty((), dtype=torch.float64)
    if isinstance(part, Rope):
        return EngineRotation(tuple(part.frequencies(like=like).tolist()), part.gain)
    divided = part.divisors(torch.tensor([[float(length)]], dtype=torch.float64))[0, 0]
    return EngineRotation(tuple((part.rope.frequencies(like=like) / divided).tolist()), part.gain)


def cos_sin(config: Path, length: int) -> tuple[Tensor, Tensor]:
    """Those of transformers for each position of a text."""
    told = transformers.AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(told)
    rotary = type(model.rotary_emb)(config=told)
    cos, sin = rotary(torch.empty(1, 1), torch.arange(length).unsqueeze(0))
    return cos[0], sin[0]


def expected_of(family: str, method: str, told: dict[str, str]) -> dict[str, str]:
    """Differences of a family; those of Llama are ``told``."""
    same = {"vLLM": "", "SGLang": "", "llama.cpp": "", "mlx-lm": ""} | told
    if family == "qwen2" and method in ("llama3", "ntk_by_parts"):
        same["llama.cpp"] = IGNORED
    if family == "gpt_neox":
        same["vLLM"] = same["SGLang"] = ""  # by transformers' own layers
        same["llama.cpp"] = BASE_TOO if method == "ntk" else IGNORED
        same["mlx-lm"] = "" if method == "ntk" else IGNORED
    return same


@pytest.mark.parametrize(
    ("method", "options", "told", "family", "width", "share", "factor"), in_turn(2, METHODS, SHAPES)
)
def test_every_engine_rotates_alike_or_is_named(
    family: str,
    width: int,
    share: float,
    factor: float,
    method: str,
    options: dict[str, Any],
    told: dict[str, str],
    tmp_path: Path,
) -> None:
    """vllm #48351, #48623, mlx-lm #1507: gains ignored, doubled, or by a formula."""
    config, part = stretched(original(family, width, share), tmp_path, method, options, factor)
    assert FIELD not in config
    assert "partial_rotary_factor" not in config
    expected = expected_of(family, method, told)
    read = ModelConfig.of(config)
    found = differences(read, length=LENGTH)
    usual, given = 0.1 * math.log(factor) + 1, options.get("temperature", 0.0)
    for engine, gain in (("SGLang", given**2 / usual), ("llama.cpp", usual)):  # twice, and lost
        if expected[engine] == GAIN:
            expected[engine] += f"{gain**2:.3g} instead of {given**2:.3g}"
    assert {name: found[name] for name in expected} == expected
    for length in (LENGTH, LENGTH + 1, int(factor * LENGTH)):
        right = rotation(part, length)
        for name in ("transformers", *expected):
            if expected.get(name) == PAST and length > LENGTH:
                with pytest.raises(UnreadError):
                    ENGINES[name].rotations(read, length)
                continue
            served = ENGINES[name].rotations(read, length)[""]
            if not expected.get(name):
                assert served.gain == pytest.approx(right.gain, rel=1e-6), name
                assert served.frequencies == pytest.approx(right.frequencies, rel=1e-6), name


@pytest.mark.parametrize(
    ("method", "options", "family", "width", "share"),
    in_turn(1, [case[:2] for case in METHODS], [("llama", 64, 1.0), ("gpt_neox", 80, 0.5)]),
)
def test_transformers_rotates_as_the_encoding(
    family: str, width: int, share: float, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    _, part = stretched(original(family, width, share), tmp_path, method, options, 4)
    for length in (LENGTH, LENGTH + 1):
        right = rotation(part, length)
        angles = torch.arange(length).unsqueeze(1) * torch.tensor(right.frequencies)
        cos, sin = cos_sin(tmp_path / "out", length)
        # angles of thousands of radians in float32
        torch.testing.assert_close(cos, right.gain * angles.cos().repeat(1, 2), rtol=0, atol=2e-3)
        torch.testing.assert_close(sin, right.gain * angles.sin().repeat(1, 2), rtol=0, atol=2e-3)


@pytest.mark.parametrize("given", [None, 1.1])
@pytest.mark.parametrize("one", [None, 0.0, 0.7])
@pytest.mark.parametrize("every", [None, 0.0, 1.3])
def test_gains_of_yarn_are_those_that_transformers_reads(
    given: float | None, one: float | None, every: float | None
) -> None:
    fields = {"attention_factor": given, "mscale": one, "mscale_all_dim": every}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, TRAINED: 512}
    yarn |= {name: value for name, value in fields.items() if value is not None}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=yarn
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    (rule,) = ENGINES["transformers"].rotations(ModelConfig.of(config.to_dict()), 2048).values()
    assert rule.gain == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("method", ["yarn", "llama3", "ntk_by_parts", "longrope"])
@pytest.mark.parametrize("stale", [{}, {TRAINED: 16}])
def test_the_trained_length_is_written_wherever_it_is_read(
    method: str, stale: dict[str, int], tmp_path: Path
) -> None:
    """llama.cpp reads it at the top, transformers prefers it there."""
    config, _ = stretched(original("llama", 64, 1.0, **stale), tmp_path, method, {}, 4)
    assert config[TRAINED] == config["rope_parameters"][TRAINED] == LENGTH
    assert config["max_position_embeddings"] == 4 * LENGTH


def test_frequencies_divided_twice_are_written(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = original("llama", 64, 1.0, rope_scaling=scaling)
    config, part = stretched(config, tmp_path, "interpolate", {}, 4)
    assert config["rope_parameters"]["factor"] == 8.0
    told = differences(config, length=LENGTH)
    assert not any(told[engine] for engine in USUAL[1:])
    assert rotation(part, 1).like(ENGINES["transformers"].rotations(ModelConfig.of(config), 1)[""])


def test_yarn_gains_that_older_vllm_scales_alike(tmp_path: Path) -> None:
    """Up to July 2026 it multiplied the default by ``attn_factor`` and knew no other name."""
    for factor in (2, 4, 8):
        options = {"temperature": 1.3}
        config, _ = stretched(
            original("llama", 64, 1.0), tmp_path / f"{factor}", "yarn", options, factor
        )
        relative = config["rope_parameters"]["attn_factor"]
        assert relative * (0.1 * math.log(factor) + 1) == pytest.approx(1.3)


def test_wrong_configs_are_told_in_words() -> None:
    """The config that NTK was once written as: logits times 9 in vLLM and mlx-lm."""
    long = [4 ** (t / 31) for t in range(32)]
    parameters = {"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.0, TRAINED: 2}
    parameters |= {"long_factor": long, "short_factor": long, "rope_theta": 500000.0}
    fields = {"rope_parameters": parameters, "rope_scaling": parameters}
    config = original("llama", 64, 1.0, **fields, max_position_embeddings=8192)
    told = "scales logits by 13 instead of 1"
    expected = dict.fromkeys(("vLLM", "SGLang", "mlx-lm"), told) | {"llama.cpp": IGNORED}
    found = differences(config, length=LENGTH)
    assert {name: found[name] for name in expected} == expected


def test_models_without_rope_have_no_differences() -> None:
    assert differences({"model_type": "bert"}, length=512) == {}
    assert differences({"model_type": "unknown"}, length=512) == {}


def test_every_method_that_transformers_names_is_held() -> None:
    named = {name for name, entry in EXTENSIONS.items() if entry.claims.transformers}
    assert named - {"direct"} == {method for method, *_ in METHODS}


@pytest.mark.parametrize("number", range(40))
def test_random_scalings_are_read_as_transformers_reads_them(number: int) -> None:
    """Of any base, width and length of training, also of one that is long for its base."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dice = random.Random(number)
    kind, width = dice.choice(["linear", "yarn", "yarn", "llama3"]), dice.choice([16, 64, 128])
    trained, factor = 2 ** dice.randint(8, 20), dice.choice([1.5, 4.0, 32.0])
    parameters = {"rope_type": kind, "rope_theta": 10.0 ** dice.uniform(2, 7), "factor": factor}
    if kind != "linear":
        parameters[TRAINED] = trained
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": dice.choice([1.5, 4.0])}
    if kind == "yarn" and dice.random() < 0.5:
        parameters |= {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": dice.random() < 0.5}
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=int(trained * factor),
        rope_parameters=parameters,
    )
    rope = LlamaRotaryEmbedding(config)
    fields = ModelConfig.of(config.to_dict())
    [found] = ENGINES["transformers"].rotations(fields, trained).values()
    assert found.frequencies == pytest.approx(rope.inv_freq.tolist(), rel=1e-5)
    assert found.gain == pytest.approx(rope.attention_scaling)
