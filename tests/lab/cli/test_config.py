"""Options from a file, and written to one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from posenc.lab.bench import BenchOptions
from posenc.lab.cli.app import CONFIGURABLE, app
from posenc.lab.declared import declared_options
from posenc.lab.evaluation.settings import EvaluationSettings, ExtensionSettings, Tuning
from posenc.lab.experiments.settings import ComparisonSettings
from tests.support.commands import run_command

Run = Callable[..., tuple[int, str, str]]


def dump(*arguments: str) -> str:
    """The file that ``--dump-config`` prints."""
    return run_command(*arguments, "--dump-config").stdout


def test_what_is_dumped_is_read_again(tmp_path: Path) -> None:
    given = ["--encodings", "rope,t5@buckets=16", "--seeds", "2", "--width", "32", "--quiet"]
    dumped = dump("compare", *given)
    assert tomllib.loads(dumped) == {
        "encodings": "rope,t5@buckets=16", "seeds": "2", "width": "32", "quiet": True,
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(dumped)
    from_file = ("compare", "--config", str(tmp_path / "run.toml"))
    assert dump(*from_file) == dumped
    changed = dump(*from_file, "--width", "64")
    assert tomllib.loads(changed) == tomllib.loads(dumped) | {"width": "64"}


def test_a_file_has_values_of_its_own_kinds(posenc: Run, tmp_path: Path) -> None:
    """Numbers and lists; a flag that is on by default is turned off."""
    (tmp_path / "run.toml").write_text("test_lengths = [128, 256]\nsteps = 10\nheads = 3\n")
    code, _, told = posenc("compare", "--config", tmp_path / "run.toml", "--width", "64")
    assert code == 2
    assert "--width: expected a multiple of heads (3)" in told
    (tmp_path / "extend.toml").write_text('checkpoint = "folder"\nreport = false\nfactor = 2\n')
    dumped = dump("extend", "--config", str(tmp_path / "extend.toml"))
    assert tomllib.loads(dumped) == {"checkpoint": "folder", "report": False, "factor": "2"}


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('encodings = "größe"\n', encoding="utf-8")
    command = [sys.executable, "-c", "from posenc.lab.cli import main; main()", "compare"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*command, "--config", path, "--dump-config"],
        env=os.environ | plain,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout) == {"encodings": "größe"}


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_what_is_wrong_with_a_file_is_said(posenc: Run, tmp_path: Path, command: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("devise = 1\n")
    code, _, told = posenc(command, "--config", path)
    assert code == 2
    assert "devise" in told
    assert "device" in told
    path.write_text("= 1\n")
    code, _, told = posenc(command, "--config", path)
    assert code == 2
    assert "--config: expected a TOML file" in told


@pytest.mark.parametrize(
    ("command", "kind", "metavars"),
    [
        ("compare", ComparisonSettings, {"seeds": "<str>", "steps": "<int>", "text": "<path>"}),
        ("extend", ExtensionSettings, {"method": "<str>", "factor": "<float>", "search": "<int>"}),
        ("extend", Tuning, {"finetune_steps": "<int>", "positions": "<str>"}),
        ("bench", BenchOptions, {"dtype": "<str>", "lengths": "<str>", "heads": "<int>"}),
        ("evaluate", EvaluationSettings, {"images": "<path>", "trained_length": "<int>"}),
    ],
)
def test_options_are_those_that_the_settings_declare(
    command: str, kind: type, metavars: dict[str, str]
) -> None:
    made = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    shown = {parameter.name: parameter for parameter in made.params}
    assert {name: shown[name].metavar for name in metavars} == metavars
    defaults = {field.name: field.default for field in fields(kind)}
    for name, (_, option) in declared_options(kind).items():
        parameter, default = shown[option.name], defaults[name]
        assert parameter.help == option.help
        assert parameter.rich_help_panel == option.group
        if parameter.is_flag:
            assert parameter.default is default
        else:
            assert parameter.show_default == (option.default or str(default))


def test_settings_reach_the_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From file and command line, each value in its type; the seed is that of tuning too."""
    taken: list[ExtensionSettings] = []

    def take(source: Path, out: Path, settings: ExtensionSettings, **_: Any) -> None:
        taken.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("posenc.lab.evaluation.extend.extend_checkpoint", take)
    (tmp_path / "run.toml").write_text("always = true\nfinetune_steps = 3\nfactor = 8\n")
    given = ["--config", str(tmp_path / "run.toml"), "--method", "ntk", "--factor", "2.5"]
    given += ["--no-report", "--seed", "7", "--finetune-rate", "0.5", "--out", str(tmp_path / "o")]
    run_command("extend", str(tmp_path), *given)
    tuning = Tuning(steps=3, rate=0.5, seed=7)
    assert taken == [
        ExtensionSettings(
            methods="ntk", factor=2.5, always=True, report=False, seed=7, tuning=tuning
        )
    ]
