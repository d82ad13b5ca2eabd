"""Folders and options that cannot be used: one line that says why, one that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cli.test_extend import changed
from tests.support.commands import refusal, run_command
from tests.support.tiny_models import tiny_model

pytest.importorskip("transformers")

COMMANDS = (
    ("doctor", "--seconds", "0"),
    ("evaluate", "--quiet"),
    ("extend", "--method", "yarn", "--factor", "2", "--no-report"),
)


def refused(command: tuple[str, ...], folder: Path, *options: str) -> str:
    """The words of a command that refuses a folder, of which nothing is left."""
    name, *given = command
    out = () if name == "doctor" else ("--out", folder.parent / "out")
    words = refusal(name, folder, *given, *options, *out)
    assert not (folder.parent / "out").exists()
    return words


def diagnosed(folder: Path, *options: str) -> str:
    """What the doctor prints, with nothing to complain of."""
    done = run_command("doctor", folder, "--seconds", "0", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


ODD, OTHER = {"rope_type": "odd", "rope_theta": 1e4}, "Qwen3ForSequenceClassification"
LONGEST = "max_position_embeddings"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3", vocab_size=256, max_position_embeddings=16).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


ADAPTER = '{"base_model_name_or_path": "org/name"}'


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "content", "read", "expected"),
    [
        ("adapter_config.json", ADAPTER, "", "got an adapter of org/name. Name that model; or"),
        ("model.gguf", "GGUF", "", "got a GGUF file. Name the folder that the file was"),
        ("model.gguf", "GGUF", "model.gguf", "got a GGUF file. Name the folder that the file was"),
    ],
)
def test_a_file_of_another_kind_is_told_from_a_model(
    name: str, content: str, read: str, expected: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    at = tmp_path / "in"
    at.mkdir()
    (at / name).write_text(content)
    assert expected in refused(command, at / read)


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        ({"rope_parameters": ODD}, "", "got rope_type 'odd', which transformers does not know."),
        ({LONGEST: -5}, "", "expected a number of tokens, 1 or more, got -5. Correct it"),
        ({LONGEST: 0}, "", "expected a number of tokens, 1 or more, got 0. Correct it"),
        ({LONGEST: 1}, "", f"trained at, 2 or more, got {LONGEST} 1 in config.json."),
        ({"architectures": [OTHER]}, "", f"images in patches, got '{OTHER}'. Take the whole"),
        ({}, "tpu", "--device: expected cpu, cuda, mps or cuda:N, got tpu"),
        ({}, "cuda:99", "--device: expected one that this machine has, got cuda:99"),
    ],
)
def test_what_cannot_be_measured(
    fields: dict[str, Any], device: str, expected: str, command: tuple[str, ...], folder: Path
) -> None:
    options = ("--device", device) if device else ()
    assert expected in refused(command, changed(folder, **fields), *options)


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
    fields: dict[str, Any], expected: str, command: tuple[str, ...], folder: Path
) -> None:
    said = refused(command, changed(folder, **fields))
    assert expected in said
    assert said.endswith("Correct it in this file, or save the config anew by save_pretrained.")


def test_numbers_out_of_their_domain(folder: Path) -> None:
    said = refused(COMMANDS[2], folder, "--factor", "1e12")
    assert "--factor: expected a finite number, 1 or more, at most 1000000, got" in said
    said = refused(COMMANDS[1], folder, "--seed", "x")
    assert "--seed: expected a whole number, got 'x'. The default is 0." in said


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
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}
STRAY = {"rope_parameters": {"odd_attention": {"rope_theta": 1e6}}, **TYPES}
LONGROPE = {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}


BY, FEW = "is refused by transformers:", LONGROPE | {"short_factor": [1.0] * 3}


def full(parameters: object) -> dict[str, Any]:
    """Fields with these parameters of the layers that see all."""
    return {"rope_parameters": {"full_attention": parameters}, **TYPES}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": 5}, "model_type in CONFIG: expected a name, got 5."),
        ({LONGEST: "64"}, 'expected a number of tokens, 1 or more, got "64".'),
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
        ({"hidden_size": "64"}, "hidden_size in CONFIG: expected a whole number of 1 or more, got"),
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
        ({"rope_scaling": {"factor": "4"}}, 'factor in CONFIG: expected a number above 0, got "4"'),
        ({"rope_scaling": {"factor": 0}}, "factor in CONFIG: expected a number above 0, got 0."),
        ({"rope_scaling": {"factor": -2.0}}, "factor in CONFIG: expected a number above 0, got -2"),
        ({"rope_scaling": {"low_freq_factor": "1"}}, 'expected a number, got "1".'),
        ({"rope_scaling": {f"original_{LONGEST}": 0}}, "of tokens, 1 or more, got 0."),
        ({"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "a list of numbers above 0, got 1.0."),
        ({"rope_scaling": LONGROPE | {"long_factor": ["a"]}}, "of numbers above 0, got ["),
        (full("yarn"), 'rope_parameters.full_attention in CONFIG: expected an object, got "yarn".'),
        (full({"factor": "4"}), "rope_parameters.full_attention.factor in CONFIG: expected a numb"),
    ],
)
def test_values_that_positions_are_not_computed_by(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    at = written(tmp_path, **fields)
    message = refused(COMMANDS[0], at).replace(str(at / "config.json"), "CONFIG")
    assert said in message
    assert message.endswith("Correct it in this file, or save the config anew by save_pretrained.")


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "llama",
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            f"{BY} The hidden size (64)",
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 5}, f"{BY} `num_hidden_layers` (2) must be"),
        ("phi3", {"rope_scaling": FEW}, "short_factor has 3 numbers for 8 pairs. Write"),
    ],
)
def test_a_config_that_transformers_refuses_is_not_extended(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    told = diagnosed(written(tmp_path, kind, **fields), "--engine", "all")
    assert said in told
    assert "Correct the config of in: transformers refuses it" in told
    assert "not compared, transformers refuses this config" in told
    assert "no extension, transformers refuses this config" in told
    assert "posenc extend" not in told


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_atten"),
        (
            "gemma3_text",
            full({"rope_type": "odd"}),
            "rope_type 'odd' is unknown to transformers 5.",
        ),
        (
            "gemma3_text",
            STRAY,
            "its parts odd_attention are ignored, because they are not in layer_",
        ),
        (
            "llama",
            {"rope_scaling": YARN},
            "beta_fast 1 is below beta_slow, 32: engines rotate by d",
        ),
        ("odd", {"text_config": {"num_hidden_layers": 2}}, "how these layers encode positions is"),
        ("llama", {"num_hidden_layers": None, "model_type": "odd"}, "does not tell its layers"),
    ],
)
def test_a_config_that_contradicts_itself(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in diagnosed(written(tmp_path, kind, **fields))


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
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """They may be right: nothing is refused, and nothing is advised."""
    told = diagnosed(written(tmp_path, kind, **fields), "--engine", "all")
    assert said in told
    assert "for posenc alone." in told
    assert "advice no extension" in told
    assert "mend 1 setting first" not in told
    if "window" not in " ".join(fields):
        assert "not compared, " in told
        assert "unknown: rotation" in told or "language_config" in fields


def test_values_by_layer_that_a_class_of_transformers_reads(tmp_path: Path) -> None:
    """As Step 3.5 has them, with those of a further part at the end."""
    types = [*TYPES["layer_types"], "full_attention"]
    fields = {"num_nextn_predict_layers": 1, "layer_types": types, "sliding_window": 7}
    fields |= {"rope_theta": [*BY_LAYER, 5e6], "partial_rotary_factors": [0.5, 1.0, 0.5]}
    fields |= {"head_dim": 16, "num_attention_groups": 2, **CUSTOM_CODE}
    told = diagnosed(written(tmp_path, "step3p5", **fields))
    assert "RoPE on 8 of 16 features, base 5,000,000" in told
    assert "RoPE, base 10,000" in told
    assert "none without effect was found" in told


def test_types_of_layers_that_are_not_known(tmp_path: Path) -> None:
    """No layer is said to be without attention, or to hold, that is not known to."""
    types = {"layer_types": ["full_attention", "odd"], "max_position_embeddings": None}
    told = diagnosed(written(tmp_path, "odd", **types))
    assert "layer_types has 'odd' (1 layer), which posenc does not know: how these attend" in told
    assert "no attention" not in told
    assert "holds" not in told
    assert "1 layer: 1 of odd unknown" in told


def test_layers_that_a_config_does_not_tell(tmp_path: Path) -> None:
    at, out = written(tmp_path, "odd", num_hidden_layers=None), tmp_path / "out"
    told = diagnosed(at, "--engine", "all", "--out", str(out))
    message = "The config does not tell its layers, so that none is judged"
    assert message in told
    assert "Verdicts by layer" not in told
    assert 'no model of type "odd" of transformers or an engine is known' in told
    page = (out / "index.html").read_text()
    assert page.count(message) == 2
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
def test_a_config_with_nothing_to_mend(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert "refused" not in diagnosed(written(tmp_path, kind, **fields), "--engine", "all")


def test_weights_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused(COMMANDS[0], written(tmp_path), "--live")
    assert "expected model.safetensors" in said
    said = refused(COMMANDS[0], Path("org/none@main"), "--live")
    assert "got no such folder, no connection to the hub, and no complete copy" in said
    assert said.endswith("hf download org/none --revision main")
