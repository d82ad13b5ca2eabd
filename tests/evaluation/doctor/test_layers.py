"""Kinds of layers, held to the sources of transformers and to default configs."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from posenc.errors import CheckpointError
from posenc.evaluation.checkpoint import require_extendable
from posenc.evaluation.doctor import diagnose
from posenc.evaluation.doctor.layers import BY_LAYER, HYBRID, IN_WINDOWS, ROTATES, WINDOWED
from posenc.evaluation.doctor.positions import Positions, positions_of
from posenc.integrations.transformers.config import Fields
from tests.support.commands import run_command

transformers = pytest.importorskip("transformers")

MODELS = Path(transformers.__file__).parent / "models"

CALL = re.compile(r"= *apply_(rotary|rope)\w*\(")
HARMLESS = re.compile(r"rope_interleave|alibi is None|kv_shared")
"""Conditions that choose between forms of RoPE, or where keys come from."""

MIXER = re.compile(r"Mamba|ShortConv|GatedDelta|RecurrentBlock|LightningAttention|DeltaNet")

MIXED = (
    *("afmoe", "bailing_hybrid", "bamba", "beam", "cohere2", "cohere2_moe", "cohere_compass"),
    *("deepseek_v4", "exaone4", "exaone_moe", "falcon_h1", "flint", "gemma3_text", "gpt_oss"),
    *("granite_swa", "granitemoe_swa", "granitemoehybrid", "kolibri1", "lfm2_moe", "lfm3"),
    *("llama4_text", "minimax", "mistral_large4_text", "modernbert", "moshi", "muse_glimmer_text"),
    *("muse_spark_text", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("qwen4_exp_text", "recurrent_gemma", "smollm3", "zamba2", "zaya"),
)
"""``model_type`` of models with RoPE and windows, NoPE, linear layers or convolutions."""


@cache
def conditions(family: str) -> tuple[str, ...]:
    """Conditions of rotations in a model's source, and its layers without attention."""
    source = sources(family)
    lines = source.splitlines()
    found = [_condition(lines, n) for n, line in enumerate(lines) if CALL.search(line)]
    found += MIXER.findall(source)
    return tuple(text for text in found if text and not HARMLESS.search(text))


def sources(family: str) -> str:
    """The modeling files of a model."""
    folder = MODELS / model_type_to_module_name(family)
    return "\n".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))


def _condition(lines: list[str], at: int) -> str:
    """The ``if`` that a line is in; "" where there is none."""
    depth = _indent(lines[at])
    for line in reversed(lines[:at]):
        if line.strip() and _indent(line) < depth:
            depth = _indent(line)
            if line.strip().startswith("if "):
                return line.strip()
            if not line.strip().startswith("else"):
                return ""
            depth += 1  # the condition of an else is before it, as far in
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def default(family: str) -> dict[str, Any]:
    """The default config of a model, of its text where it has one."""
    values: dict[str, Any] = AutoConfig.for_model(family).to_dict()
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def rotating(found: list[Positions]) -> list[Positions]:
    return [place for place in found if place.encoding == "rope"]


@pytest.mark.parametrize("family", ROTATES)
def test_models_said_to_rotate_throughout_rotate_unconditionally(family: str) -> None:
    allowed = {"beam": ("if position_embeddings is not None:",)}  # null rope_parameters
    assert set(conditions(family)) <= set(allowed.get(family, ()))
    config = default(family)
    if config.get("layer_types") is None and family not in WINDOWED:
        assert not re.search(r"create_(sliding|chunked)_", sources(family))
    for place in rotating(positions_of(config)):
        assert not place.layers.startswith("some")
        assert place.breaks_at is None or "window" not in place.described


@pytest.mark.parametrize("family", [*HYBRID, *IN_WINDOWS, *BY_LAYER])
def test_models_said_to_rotate_in_some_layers_do_so_on_a_condition(family: str) -> None:
    # the last two choose parameters by layer type
    assert conditions(family) or family in ("minimax", "bailing_hybrid")


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_of_all_layers_are_masked_by_one_condition(family: str) -> None:
    (path,) = (MODELS / family).glob("modeling_*.py")
    choice = r"create_causal_mask if self\.config\.sliding_window is None"
    assert re.search(choice, path.read_text())


@pytest.mark.parametrize("family", MIXED)
def test_mixed_models_are_not_said_to_rotate_or_to_break_throughout(family: str) -> None:
    config = default(family)
    found = positions_of(config)
    assert not any(place.layers.startswith("all") and place.breaks_at for place in rotating(found))
    for place in found:
        if "sliding" in place.layers or "window" in place.described:
            assert place.breaks_at is None
    told = {place.encoding for place in found} - {"rope"}
    if family in (*HYBRID, *IN_WINDOWS) and family != "lfm2_moe":
        assert told
    for place in rotating(found):
        assert place.layers[0].isdigit() or place.layers.startswith("some")


NUMBERS: dict[str, list[tuple[str, str, int | None]]] = {
    "smollm3": [
        ("27 of 36 layers (full_attention)", "rope", 32769),
        ("9 of 36 layers (full_attention)", "nope", None),
    ],
    "llama4_text": [
        ("36 of 48 layers (chunked_attention)", "rope", None),
        ("12 of 48 layers (full_attention)", "nope", None),
    ],
    "cohere2": [
        ("30 of 40 layers (sliding_attention)", "rope", None),
        ("10 of 40 layers (full_attention)", "nope", None),
    ],
    "qwen3_next": [
        ("36 of 48 layers (linear_attention)", "", None),
        ("12 of 48 layers (full_attention)", "rope", 32769),
    ],
    "gemma3_text": [
        ("22 of 26 layers (sliding_attention)", "rope", None),
        ("4 of 26 layers (full_attention)", "rope", 131073),
    ],
    "mistral": [("all 32 layers", "rope", None)],
    "qwen2": [("all 32 layers", "rope", 32769)],
    "bamba": [("some or all 32 layers", "rope", None)],
}


@pytest.mark.parametrize(("family", "expected"), NUMBERS.items())
def test_layers_by_kind(family: str, expected: list[tuple[str, str, int | None]]) -> None:
    found = positions_of(default(family))
    assert [(place.layers, place.encoding, place.breaks_at) for place in found] == expected


def test_configs_without_layer_types_are_not_guessed() -> None:
    """As on the Hub, read where transformers is not installed."""
    for family, window in (("gemma2", {"sliding_window": 512}), ("smollm3", {}), ("cohere2", {})):
        config = {"model_type": family, "num_hidden_layers": 4, "rope_theta": 1e4, **window}
        (place,) = positions_of(config | {"max_position_embeddings": 2048})
        assert place.breaks_at is None
        assert "not known" in place.why


def test_configs_are_completed_by_transformers(tmp_path: Path) -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 4, "rope_theta": 1e4}
    config |= {"sliding_window": 512, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    windows, full = diagnose(tmp_path, budget=0).positions
    assert windows.described == "RoPE, base 10,000, in windows of 512 tokens"
    assert full.breaks_at == 2049


def test_unknown_configs_are_read_as_they_are(tmp_path: Path) -> None:
    config = {"model_type": "new", "num_hidden_layers": 4, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (place,) = diagnose(tmp_path, budget=0).positions
    assert place.layers == "some or all 4 layers"


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "gpt_neox", "bert", "bloom", "gemma3_text", "gpt2", "t5"],
)
def test_methods_are_named_for_models_that_extend_takes(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    named = diagnose(tmp_path, budget=0).extensions
    try:
        require_extendable(Fields.read(tmp_path), family)
    except CheckpointError:
        assert not any(named.values())
    else:
        assert all(named.values())
        assert "direct" not in {name for names in named.values() for name in names}


def test_methods_of_a_stretched_rope_are_those_that_fit_it(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    AutoConfig.for_model("llama", rope_parameters=scaling).save_pretrained(tmp_path)
    named = diagnose(tmp_path, budget=0).extensions["rope"]
    assert "interpolate" in named
    assert "yarn" not in named


def test_models_that_extend_refuses_are_told(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    printed = run_command("doctor", str(tmp_path), "--seconds", "0").stdout
    assert "extended by" not in printed
    assert "posenc extend does not take this model" in printed
