"""Folders and options that cannot be used: one line that says why, one that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import tiny_model

pytest.importorskip("transformers")

Run = Callable[..., tuple[int, str, str]]
COMMANDS = (
    ("doctor", "--seconds", "0"),
    ("evaluate", "--quiet"),
    ("extend", "--method", "yarn", "--factor", "2", "--no-report"),
)


def refused(posenc: Run, command: tuple[str, ...], folder: Path, *options: str) -> str:
    """The words of a command that refuses a folder."""
    name, *given = command
    out = () if name == "doctor" else ("--out", folder.parent / "out")
    code, printed, said = posenc(name, folder, *given, *options, *out)
    assert (code, printed) == (2, "")
    assert "Traceback" not in said
    assert not (folder.parent / "out").exists()
    return " ".join(said.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3", vocab_size=256, max_position_embeddings=16).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_an_adapter_is_told_from_a_model(
    command: tuple[str, ...], posenc: Run, tmp_path: Path
) -> None:
    at = tmp_path / "adapter"
    at.mkdir()
    (at / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name"}')
    said = refused(posenc, command, at)
    assert "got an adapter of org/name. Name that model; or merge the adapter into it" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gguf_file_is_told_from_a_model(
    command: tuple[str, ...], posenc: Run, tmp_path: Path
) -> None:
    at = tmp_path / "gguf"
    at.mkdir()
    (at / "model.gguf").write_bytes(b"GGUF")
    for named in (at, at / "model.gguf"):
        said = refused(posenc, command, named)
        assert "got a GGUF file. Name the folder that the file was converted from." in said


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_a_scaling_that_transformers_does_not_know(
    command: tuple[str, ...], posenc: Run, folder: Path
) -> None:
    parameters = {"rope_type": "odd", "rope_theta": 1e4}
    said = refused(posenc, command, changed(folder, rope_parameters=parameters))
    assert "got rope_type 'odd', which transformers does not know. Correct its config" in said


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("length", [-5, 0, 1])
def test_a_trained_length_that_is_none(
    length: int, command: tuple[str, ...], posenc: Run, folder: Path
) -> None:
    said = refused(posenc, command, changed(folder, max_position_embeddings=length))
    if length < 1:
        assert f"expected a number of tokens, 1 or more, got {length}. Correct it" in said
    else:
        assert "trained at, 2 or more, got max_position_embeddings 1 in config.json." in said


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("tpu", "expected cpu, cuda, mps or cuda:N"),
        ("cuda:99", "expected one that this machine has"),
    ],
)
def test_a_device_that_is_none(
    device: str, expected: str, command: tuple[str, ...], posenc: Run, folder: Path
) -> None:
    assert f"--device: {expected}, got {device}" in refused(
        posenc, command, folder, "--device", device
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_attention_heads": 0}, "a whole number of 1 or more, got 0."),
        ({"rope_theta": "x", "rope_parameters": None}, 'a number above 1, got "x".'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "above 1, got 0."),
    ],
)
def test_values_of_positions_are_checked_by_every_command(
    fields: dict[str, Any], expected: str, command: tuple[str, ...], posenc: Run, folder: Path
) -> None:
    said = refused(posenc, command, changed(folder, **fields))
    assert expected in said
    assert said.endswith("Correct it in this file, or save the config anew by save_pretrained.")


def test_a_factor_that_no_method_reaches(posenc: Run, folder: Path) -> None:
    said = refused(posenc, COMMANDS[2], folder, "--factor", "1e12")
    assert "--factor: expected a finite number, 1 or more, at most 1000000, got" in said


def written(tmp_path: Path, kind: str = "llama", **fields: Any) -> Path:
    """A folder with nothing but the config of a tiny model and these fields."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    rope = {"max_position_embeddings": 64, "rope_theta": 1e4}
    at = tmp_path / "in"
    at.mkdir()
    config = {"model_type": kind, **sizes, **heads, **rope, **fields}
    (at / "config.json").write_text(json.dumps(config))
    return at


TYPES = {"layer_types": ["full_attention", "sliding_attention"]}
LONGROPE = {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": 5}, "model_type in CONFIG: expected a name, got 5."),
        ({"max_position_embeddings": "64"}, 'expected a number of tokens, 1 or more, got "64".'),
        ({"max_position_embeddings": -5}, "expected a number of tokens, 1 or more, got -5."),
        ({"rope_theta": "10000"}, 'rope_theta in CONFIG: expected a number above 1, got "10000".'),
        ({"rope_theta": 0}, "rope_theta in CONFIG: expected a number above 1, got 0."),
        ({"rope_theta": -1e4}, "expected a number above 1, got -10000.0."),
        ({"rope_theta": [1e4]}, "expected a number above 1, got [10000.0]."),
        ({"rope_theta": {"full": 1e4}}, 'expected a number above 1, got {"full": 10000.0}.'),
        ({"rope_theta": True}, "expected a number above 1, got true."),
        ({"rope_theta": 1.0}, "expected a number above 1, got 1.0."),
        ({"partial_rotary_factor": 3.0}, "expected a share from 0 to 1, got 3.0."),
        ({"sliding_window": -5}, "expected a whole number of tokens, or -1, got -5."),
        ({"num_key_value_heads": 0}, "expected a whole number of 1 or more, got 0."),
        ({"layer_types": [["full_attention"]]}, 'a list of names, got [["full_attention"]].'),
        ({"num_attention_heads": "4"}, 'expected a whole number of 1 or more, got "4".'),
        ({"num_attention_heads": 0}, "expected a whole number of 1 or more, got 0."),
        ({"num_hidden_layers": -2}, "expected a whole number of 1 or more, got -2."),
        (
            {"hidden_size": "64"},
            'hidden_size in CONFIG: expected a whole number of 1 or more, got "',
        ),
        ({"head_dim": "16"}, 'head_dim in CONFIG: expected a whole number, got "16".'),
        ({"partial_rotary_factor": "0.5"}, 'expected a share from 0 to 1, got "0.5".'),
        ({"sliding_window": "7"}, 'expected a whole number of tokens, or -1, got "7".'),
        ({"layer_types": "full_attention"}, 'expected a list of names, got "full_attention".'),
        ({"layer_types": [1, 2]}, "layer_types in CONFIG: expected a list of names, got [1, 2]."),
        ({"text_config": [1]}, "text_config in CONFIG: expected an object, got [1]."),
        ({"text_config": {"rope_theta": 0}}, "text_config.rope_theta in CONFIG: expected a number"),
        ({"rope_scaling": "yarn"}, 'rope_scaling in CONFIG: expected an object, got "yarn".'),
        ({"rope_scaling": [1]}, "rope_scaling in CONFIG: expected an object, got [1]."),
        ({"rope_scaling": {"rope_type": 5}}, "rope_scaling.rope_type in CONFIG: expected a name"),
        (
            {"rope_scaling": {"factor": "4"}},
            'factor in CONFIG: expected a number above 0, got "4".',
        ),
        ({"rope_scaling": {"factor": 0}}, "factor in CONFIG: expected a number above 0, got 0."),
        ({"rope_scaling": {"factor": -2.0}}, "factor in CONFIG: expected a number above 0, got -2"),
        ({"rope_scaling": {"low_freq_factor": "1"}}, 'expected a number, got "1".'),
        (
            {"rope_scaling": {"original_max_position_embeddings": 0}},
            "expected a number of tokens, 1 or more, got 0.",
        ),
        ({"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "a list of numbers above 0, got 1.0."),
        ({"rope_scaling": LONGROPE | {"long_factor": ["a"]}}, "of numbers above 0, got ["),
        (
            {"rope_parameters": {"full_attention": "yarn"}, **TYPES},
            'rope_parameters.full_attention in CONFIG: expected an object, got "yarn".',
        ),
        (
            {"rope_parameters": {"full_attention": {"factor": "4"}}, **TYPES},
            "rope_parameters.full_attention.factor in CONFIG: expected a number above 0",
        ),
    ],
)
def test_values_that_positions_are_not_computed_by(
    fields: dict[str, Any], said: str, posenc: Run, tmp_path: Path
) -> None:
    at = written(tmp_path, **fields)
    message = refused(posenc, COMMANDS[0], at).replace(str(at / "config.json"), "CONFIG")
    assert said in message
    assert message.endswith("Correct it in this file, or save the config anew by save_pretrained.")


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "llama",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "is refused by transformers: The hidden size (64) is not a multiple of the number of",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention"] * 5},
            "is refused by transformers: `num_hidden_layers` (2) must be equal to the number of",
        ),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}},
            'short_factor has 3 numbers for 8 pairs. Write "short_factor" with one number a pair.',
        ),
    ],
)
def test_a_config_that_transformers_refuses_is_not_extended(
    kind: str, fields: dict[str, Any], said: str, posenc: Run, tmp_path: Path
) -> None:
    options = ("--seconds", "0", "--engine", "all")
    code, printed, _ = posenc("doctor", written(tmp_path, kind, **fields), *options)
    assert code == 0
    assert said in printed
    assert "Correct the config of in: transformers refuses it" in printed
    assert "Engines: not compared, transformers refuses this config." in printed
    assert "Advice: no extension, transformers refuses this config." in printed
    assert "posenc extend" not in printed


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_key_value_heads 3 does not divide num_attention_heads 4",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "odd"}}, **TYPES},
            "rope_type 'odd' is unknown to transformers 5.",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"odd_attention": {"rope_theta": 1e6}}, **TYPES},
            "its parts odd_attention are ignored, because they are not in layer_types.",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}},
            "beta_fast 1 is below beta_slow, 32: engines rotate by different frequencies.",
        ),
        ("odd", {"text_config": {"num_hidden_layers": 2}}, "how these layers encode positions is"),
        ("llama", {"num_hidden_layers": None, "model_type": "odd"}, "does not tell its layers."),
    ],
)
def test_a_config_that_contradicts_itself(
    kind: str, fields: dict[str, Any], said: str, posenc: Run, tmp_path: Path
) -> None:
    code, printed, _ = posenc("doctor", written(tmp_path, kind, **fields), "--seconds", "0")
    assert code == 0
    assert said in printed


CUSTOM_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
BY_LAYER = [5e6, 1e4]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "llama",
            {"rope_theta": BY_LAYER, **CUSTOM_CODE},
            "rope_theta has 2 values, which code of",
        ),
        ("odd", {"rope_theta": BY_LAYER, **TYPES}, "own (model_type 'odd') reads and posenc does"),
        ("odd", {"rope_scaling": {"factor": [4.0, 1.0]}}, "rope_scaling.factor has 2 values"),
        ("odd", {"partial_rotary_factor": [0.5, 1.0]}, "how these layers rotate is not known"),
        ("odd", {"sliding_window": [None, 512]}, "what it says of these layers is not known"),
        ("odd", {"language_config": {"rope_theta": BY_LAYER}}, "language_config.rope_theta has 2"),
    ],
)
def test_values_by_layer_of_code_of_a_models_own(
    kind: str, fields: dict[str, Any], said: str, posenc: Run, tmp_path: Path
) -> None:
    """They may be right: nothing is refused, and nothing is advised."""
    at = written(tmp_path, kind, **fields)
    code, printed, error = posenc("doctor", at, "--seconds", "0", "--engine", "all")
    assert (code, error) == (0, "")
    assert said in printed
    assert "for posenc alone." in printed
    assert "Advice: no extension" in printed
    assert "mend 1 setting first" not in printed
    if "window" not in " ".join(fields):
        assert "Engines: not compared" in printed
        assert "unknown: rotation" in printed or "language_config" in fields


def test_values_by_layer_that_a_class_of_transformers_reads(posenc: Run, tmp_path: Path) -> None:
    """As Step 3.5 has them, with those of a further part at the end."""
    types = [*TYPES["layer_types"], "full_attention"]
    fields = {"num_nextn_predict_layers": 1, "layer_types": types, "sliding_window": 7}
    fields |= {"rope_theta": [*BY_LAYER, 5e6], "partial_rotary_factors": [0.5, 1.0, 0.5]}
    at = written(tmp_path, "step3p5", head_dim=16, num_attention_groups=2, **fields, **CUSTOM_CODE)
    code, printed, error = posenc("doctor", at, "--seconds", "0")
    assert (code, error) == (0, "")
    assert "RoPE on 8 of 16 features, base 5,000,000" in printed
    assert "RoPE, base 10,000" in printed
    assert "No setting without effect was found." in printed


def test_types_of_layers_that_are_not_known(posenc: Run, tmp_path: Path) -> None:
    """No layer is said to be without attention, or to hold, that is not known to."""
    types = {"layer_types": ["full_attention", "odd"], "max_position_embeddings": None}
    code, printed, _ = posenc("doctor", written(tmp_path, "odd", **types), "--seconds", "0")
    assert code == 0
    assert (
        "layer_types has 'odd' (1 layer), which posenc does not know: how these attend" in printed
    )
    assert "no attention" not in printed
    assert "holds" not in printed
    assert "1 layer: 1 of odd unknown" in printed


def test_layers_that_a_config_does_not_tell(posenc: Run, tmp_path: Path) -> None:
    at, out = written(tmp_path, "odd", num_hidden_layers=None), tmp_path / "out"
    code, printed, _ = posenc("doctor", at, "--seconds", "0", "--engine", "all", "--out", out)
    assert code == 0
    told = "The config does not tell its layers, so that none is judged."
    assert told in printed
    assert "Verdicts by layer" not in printed
    assert 'no model of type "odd" of transformers or an engine is known' in printed
    page = (out / "index.html").read_text()
    assert page.count(told) == 2
    assert '<table class="verdicts' not in page


INFINITE = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
"""An infinity as transformers writes it to JSON."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"rope_scaling": {}}),
        ("stablelm", {"partial_rotary_factor": 0.0}),
        ("llama", {"text_config": {}}),
        ("odd", {"hidden_size": [64, 32], "num_attention_heads": [4, 2]}),
        ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1, **INFINITE}),
    ],
)
def test_a_config_with_nothing_to_mend(
    kind: str, fields: dict[str, Any], posenc: Run, tmp_path: Path
) -> None:
    at = written(tmp_path, kind, **fields)
    code, printed, _ = posenc("doctor", at, "--seconds", "0", "--engine", "all")
    assert code == 0
    assert "refused" not in printed


def test_an_engine_that_is_none(posenc: Run, tmp_path: Path) -> None:
    said = refused(posenc, COMMANDS[0], written(tmp_path), "--engine", "vlm")
    assert "--engine: expected a known name, got 'vlm'. Did you mean 'vllm'?" in said
    assert "Valid: all, llama.cpp, mlx, sglang, transformers, vllm." in said


def test_weights_are_missing(posenc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused(posenc, COMMANDS[0], written(tmp_path), "--live")
    assert "expected model.safetensors" in said
    said = refused(posenc, COMMANDS[0], Path("org/none@main"), "--live")
    assert "got no such folder, no connection to the hub, and no complete copy" in said
    assert said.endswith("hf download org/none --revision main")
