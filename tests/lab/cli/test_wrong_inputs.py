"""Inputs of trained models that cannot be used: refused in a sentence, before work is lost."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc.transformers.doctor.config_values import LIMITS
from tests.lab.cli.test_extend import TEXT, TOKENIZER, base, changed
from tests.lab.cli.test_wrong_folders import COMMANDS, diagnosed, folder, refused, written
from tests.support.commands import printed, printed_json, refusal, run_command
from tests.support.exhaustive import kept_in_suite

__all__ = ["base", "folder"]

MEASURING = ("evaluate", "--quiet"), ("extend", "--method", "yarn", "--factor", "2", "--quiet")


@pytest.fixture
def learned(base: Path, tmp_path: Path) -> Path:
    """A copy of a model that has learned its text, and the text beside it."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    return Path(shutil.copytree(base, tmp_path / "in"))


def told(command: tuple[str, ...], folder: Path, *options: object) -> str:
    """The words of a command that refuses a folder or its text, of which nothing is left."""
    text = ("--text", folder.parent / "text.txt")
    said = refused(command, folder, *map(str, (*text, *options)))
    assert {path.name for path in folder.parent.iterdir()} <= {"in", "text.txt"}
    return said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"],
)
def test_sizes_of_no_model_are_refused_at_once(
    name: str, command: tuple[str, ...], folder: Path
) -> None:
    """Each was built before: for minutes, or until memory was full."""
    (most,) = (most for most, names in LIMITS.items() if name in names)
    said = refused(command, changed(folder, **{name: 10_000_000}))
    assert f"{name} in {folder / 'config.json'}: expected at most {most:,}, got 10000000." in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": 10**12}, "vocab_size in CONFIG: expected at most 2,147,483,648, got 1"),
        ({"max_position_embeddings": 10**30}, "expected at most 9,007,199,254,740,992, got 1"),
        ({"model_type": "gpt2", "n_layer": 10**7}, "n_layer in CONFIG: expected at most 1,024"),
        ({"model_type": "t5", "num_decoder_layers": 10**7}, "expected at most 1,024, got 10000000"),
        ({"num_attention_heads": [4, 10**7]}, "expected at most 8,192, got [4, 10000000]."),
        ({"text_config": {"num_hidden_layers": 10**7}}, "text_config.num_hidden_layers in CONFIG:"),
        ({"architectures": 5}, "architectures in CONFIG: expected a list of names, got 5."),
    ],
)
def test_further_sizes_are_held_to_a_limit(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    at = written(tmp_path, **fields)
    assert said in refused(COMMANDS[0], at).replace(str(at / "config.json"), "CONFIG")


def test_sizes_at_the_limit_are_read(tmp_path: Path) -> None:
    """Of a type that nothing is built of."""
    sizes = {"num_hidden_layers": 1024, "num_attention_heads": 2**13, "num_key_value_heads": 2**13}
    sizes |= {"hidden_size": 2**20, "head_dim": 2**16, "vocab_size": 2**31}
    told = diagnosed(written(tmp_path, "odd", **sizes))
    assert "1,024 layers" in told or "1024 layers" in told


@pytest.mark.parametrize(
    "length", kept_in_suite(['"64"', "null", "1e30", "[1]", str(10**30)], ["[1]", str(10**30)])
)
def test_a_tokenizer_with_an_odd_longest_text(length: str, learned: Path) -> None:
    """transformers writes 10^30 where there is no limit."""
    path = learned / "tokenizer_config.json"
    path.write_text(f'{{"model_max_length": {length}}}')
    assert "model_max_length" not in diagnosed(learned)
    out = ("--tasks", "none", "--out", learned.parent / "out")
    text = ("--text", learned.parent / "text.txt", "--lengths", "8,16")
    assert printed_json("evaluate", learned, *text, *out)["length"] == 16


@pytest.mark.parametrize("command", MEASURING)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers(
    number: float, command: tuple[str, ...], learned: Path
) -> None:
    file = learned / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], number)
    save_file(tensors, file, metadata={"format": "pt"})
    said = told(command, learned)
    assert "the model's output: expected finite numbers, got NaN or infinity. Its weights" in said


@pytest.mark.parametrize("command", MEASURING)
def test_weights_of_another_size_than_the_config(command: tuple[str, ...], learned: Path) -> None:
    width = json.loads((learned / "config.json").read_text())["hidden_size"]
    said = told(command, changed(learned, intermediate_size=40))
    assert "_proj.weight of shape [" in said
    assert f", where config.json gives [40, {width}]. Correct its config.json" in said


RERANGED = {"method": "rerope", "factor": 2.0, "length": 16, "options": {}}


@pytest.mark.parametrize(
    "extension",
    [
        *(5, {}, RERANGED | {"options": 5}, RERANGED | {"method": "odd"}),
        *(RERANGED | {"factor": "2"}, RERANGED | {"options": {"odd": 1}}),
    ],
)
def test_an_extension_of_posenc_that_is_none(extension: Any, learned: Path) -> None:
    said = told(MEASURING[0], changed(learned, posenc_extension=extension))
    assert f"posenc_extension in {learned / 'config.json'}: expected " in said


def with_words(learned: Path) -> Path:
    """With a tokenizer of as many words as the model has ids."""
    (learned / "tokenizer.json").write_text(TOKENIZER)
    return learned


def test_a_chat_template_that_is_no_text(learned: Path) -> None:
    (with_words(learned) / "chat_template.jinja").write_bytes(b"\xff\xfe\x80")
    said = told(MEASURING[0], learned)
    assert "chat_template.jinja: expected a chat template, got bytes that are not UTF-8." in said
    (learned / "chat_template.jinja").unlink()
    (learned / "chat_template.jinja").mkdir()
    said = told(MEASURING[0], learned)
    assert "expected a chat template, got a folder, not a file." in said


@pytest.mark.parametrize("template", [["a"], [{"x": 1}], [{"name": [1], "template": "a"}], 5, {}])
def test_chat_templates_without_a_default(template: Any, learned: Path) -> None:
    path = with_words(learned) / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": template}))
    said = told(MEASURING[0], learned, "--style", "chat")
    assert "--style: expected base, for a tokenizer without a chat template, got chat." in said


@pytest.mark.parametrize("text", [b" " * 4000, b"\0" * 4000, b"one two three " * 3 + b"\n" * 4000])
def test_a_text_of_no_sentences(text: bytes, learned: Path) -> None:
    """Its loss alone is measured: there is nothing to ask questions of."""
    (learned.parent / "text.txt").write_bytes(text)
    given = ("evaluate", learned, "--text", learned.parent / "text.txt", "--lengths", "8,16")
    done = run_command(*given, "--out", learned.parent / "out", "--json")
    assert "Traceback" not in done.stderr
    # of two different bytes, one after the other, the model knows too little
    assert done.returncode in (0, 2)
    assert json.loads(done.stdout)["findings"][0]["untuned"]["tasks"] == {}


@pytest.mark.parametrize("command", [*MEASURING, ("doctor", "--seconds", "0")])
def test_an_output_folder_that_cannot_be_is_refused_before_any_work(
    command: tuple[str, ...], learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing input would be told of first by all that comes later."""
    name, *options = command
    file = learned / "config.json"
    for out, reason in (
        (file / "x", f"got {file}, which is a file."),
        (file / "x/y", f"got {file}, which is a file."),
        (learned.parent / ("y" * 300), "got File name too long."),
    ):
        said = refusal(name, learned.parent / "none", *options, "--out", out)
        assert "--out: expected to write " in said
        assert reason in said
    monkeypatch.setattr("os.access", lambda path, mode: False)
    said = refusal(name, learned.parent / "none", *options, "--out", learned.parent / "a/b")
    assert f"got no permission to write to {learned.parent}. Choose a folder you may write" in said


@pytest.mark.parametrize("command", MEASURING)
def test_a_path_that_is_empty_is_not_this_folder(command: tuple[str, ...], learned: Path) -> None:
    """As the value of a variable of the shell that is not set."""
    assert "--text: expected a path, got ''. Leave it out." in told(command, learned, "--text", "")


@pytest.mark.parametrize("command", MEASURING)
def test_an_error_does_not_take_what_an_earlier_run_kept(
    command: tuple[str, ...], learned: Path
) -> None:
    """Neither a damaged file is deleted unseen, nor good readings with another text's name."""
    state = learned.parent / "out-measured.json"
    name, *options = command
    given = (name, learned, *options, "--out", learned.parent / "out")
    state.write_text('{"conditions": "a", "read')
    said = refusal(*given, "--text", learned.parent / "text.txt")
    assert f"{state}: expected a complete file written by posenc" in said
    assert state.exists()
    state.write_text('{"conditions": "a", "readings": {}}')
    assert "nothing there" in refusal(*given, "--text", learned.parent / "none.txt")
    assert state.exists()


def test_a_state_in_the_way_is_left_alone(learned: Path) -> None:
    state = learned.parent / "out-measured.json"
    state.mkdir()
    given = ("extend", learned, "--method", "yarn", "--factor", "2")
    out = ("--out", learned.parent / "out")
    said = refusal(*given, *out, "--text", learned.parent / "text.txt")
    assert f"{state}: expected a complete file written by posenc, got a folder" in said
    printed(*given, *out, "--no-report")
    assert state.is_dir()
