"""Options from a file, and written to one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from posenc.arguments import declared_options
from posenc.cli.app import CONFIGURABLE, app
from posenc.experiments.settings import ComparisonSettings
from tests.support.commands import run_command

Run = Callable[..., tuple[int, str, str]]


def dump(*arguments: object) -> str:
    return run_command(*map(str, arguments), "--dump-config").stdout


def test_what_is_dumped_is_read_again(tmp_path: Path) -> None:
    given = ["--encodings", "rope,t5@buckets=16", "--seeds", "2", "--width", "32", "--quiet"]
    dumped = dump("compare", *given)
    assert tomllib.loads(dumped) == {
        "encodings": "rope,t5@buckets=16", "seeds": "2", "width": "32", "quiet": True,
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(dumped)
    assert dump("compare", "--config", tmp_path / "run.toml") == dumped
    changed = dump("compare", "--config", tmp_path / "run.toml", "--width", "64")
    assert tomllib.loads(changed) == tomllib.loads(dumped) | {"width": "64"}


def test_a_file_has_values_of_its_own_kinds(posenc: Run, tmp_path: Path) -> None:
    """Numbers and lists; a flag that is on by default is turned off."""
    (tmp_path / "run.toml").write_text("test_lengths = [128, 256]\nsteps = 10\nheads = 3\n")
    code, _, told = posenc("compare", "--config", tmp_path / "run.toml", "--width", "64")
    assert code == 2
    assert "--width: expected a multiple of heads (3)" in told
    (tmp_path / "extend.toml").write_text('checkpoint = "folder"\nreport = false\nfactor = 2\n')
    dumped = dump("extend", "--config", tmp_path / "extend.toml")
    assert tomllib.loads(dumped) == {"checkpoint": "folder", "report": False, "factor": 2.0}


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_what_is_wrong_with_a_file_is_said(posenc: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("sead = 1\n")
    code, _, told = posenc(command, "--config", path)
    assert code == 2
    assert "sead" in told
    assert "seed" in told
    path.write_text("= 1\n")
    code, _, told = posenc(command, "--config", path)
    assert code == 2
    assert "--config: expected a TOML file" in told


def test_options_are_those_that_the_settings_declare() -> None:
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    shown = {parameter.name: parameter for parameter in command.params}
    declared = declared_options(ComparisonSettings)
    defaults = {field.name: field.default for field in fields(ComparisonSettings)}
    assert {"task", "encodings", "width", "precision", "workers"} <= declared.keys()
    kinds = {name: shown[name].metavar for name in ("seeds", "steps", "text", "learning_rate")}
    assert list(kinds.values()) == ["<str>", "<int>", "<path>", "<float>"]
    for name, (_, told) in declared.items():
        assert shown[name].help == told.help
        assert shown[name].rich_help_panel == told.group
        assert shown[name].show_default == (told.default or str(defaults[name]))
