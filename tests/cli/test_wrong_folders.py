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
    told = f"max_position_embeddings {length}" if length else "no max_position_embeddings"
    assert f"trained at, 2 or more, got {told} in config.json. Give it in tokens." in said


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


def test_heads_that_are_none_end_in_a_line(posenc: Run, folder: Path) -> None:
    said = refused(posenc, COMMANDS[1], changed(folder, num_attention_heads=0))
    assert "got ZeroDivisionError: " in said
    assert "Correct its config.json, or name a folder written by save_pretrained." in said


def test_a_factor_that_no_method_reaches(posenc: Run, folder: Path) -> None:
    said = refused(posenc, COMMANDS[2], folder, "--factor", "1e12")
    assert "--factor: expected a finite number, 1 or more, at most 1000000, got" in said
