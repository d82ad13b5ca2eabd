"""Options from a file and their help, and how long is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from posenc.lab.bench import BenchOptions
from posenc.lab.cli.app import COMMANDS, arguments_of
from posenc.lab.cli.compare import CompareDisplay
from posenc.lab.cli.console import Countdown
from posenc.lab.declared import declared_options
from posenc.lab.evaluation.settings import EvaluationSettings, ExtensionSettings, Tuning
from posenc.lab.experiments import progress
from posenc.lab.experiments.settings import ComparisonSettings
from tests.support.commands import refusal, run_command

CONFIGURABLE = ("compare", "extend", "evaluate", "bench")


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
    assert tomllib.loads(dump("compare", "--seeds", "2", "--seeds", "1,5")) == {"seeds": "1,5"}
    assert tomllib.loads(dump("compare", "--option", "a=1,2", "--option", "b=3")) == {
        "option": ["a=1,2", "b=3"]
    }
    (tmp_path / "python.toml").write_text('task_options = ["a=1,2"]\n')
    named = dump("compare", "--config", str(tmp_path / "python.toml"))
    assert tomllib.loads(named) == {"option": ["a=1,2"]}, "by the argument's name in Python too"
    changed = dump(*from_file, "--width", "64")
    assert tomllib.loads(changed) == tomllib.loads(dumped) | {"width": "64"}


def test_a_file_has_values_of_its_own_kinds(tmp_path: Path) -> None:
    """Numbers and lists; a flag that is on by default is turned off."""
    (tmp_path / "run.toml").write_text("test_lengths = [128, 256]\nsteps = 10\nheads = 3\n")
    told = refusal("compare", "--config", tmp_path / "run.toml", "--width", "64")
    assert "--width: expected a multiple of heads (3)" in told
    (tmp_path / "extend.toml").write_text('checkpoint = "folder"\nreport = false\nfactor = 2\n')
    dumped = dump("extend", "--config", str(tmp_path / "extend.toml"))
    assert tomllib.loads(dumped) == {"checkpoint": "folder", "report": False, "factor": "2"}


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('encodings = "größe"\n', encoding="utf-8")
    command = [sys.executable, "-c", "from posenc.lab.cli import main; main()", "compare"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command += ["--config", str(path), "--dump-config"]
    dumped = subprocess.check_output(command, env=os.environ | plain, text=True)
    assert tomllib.loads(dumped) == {"encodings": "größe"}


@pytest.mark.parametrize("command", CONFIGURABLE)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, command: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("devise = 1\n")
    told = refusal(command, "--config", path)
    assert "devise" in told
    assert "device" in told
    path.write_text("= 1\n")
    assert "--config: expected a TOML file" in refusal(command, "--config", path)


@pytest.mark.parametrize(
    ("command", "kind", "metavars"),
    [
        ("compare", ComparisonSettings, ["seeds INT", "steps INT", "text PATH"]),
        ("extend", ExtensionSettings, ["method STR", "factor FLOAT", "search INT"]),
        ("extend", Tuning, ["finetune-steps INT", "positions CHOICE"]),
        ("bench", BenchOptions, ["dtype CHOICE", "lengths INT", "heads INT"]),
        ("evaluate", EvaluationSettings, ["images PATH", "trained-length INT"]),
    ],
)
def test_options_are_those_that_the_settings_declare(
    command: str, kind: type, metavars: list[str]
) -> None:
    """Each in its group of the help, with the type of its values."""
    told = run_command(command, "--help").stdout
    for metavar in metavars:
        assert f"--{metavar}" in told
    shown = {argument.name: argument for argument in arguments_of(command)}
    defaults = {field.name: field.default for field in fields(kind)}
    for name, (_, option) in declared_options(kind).items():
        argument, default = shown["--" + option.name.replace("_", "-")], defaults[name]
        assert argument.parameter.help == option.help
        assert [group.name for group in argument.parameter.group] == [option.group]
        assert f"─ {option.group} ─" in told
        if isinstance(default, bool):
            assert bool(argument.negatives) is default
        else:
            assert argument.show_default == (option.default or str(default))


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
    chosen = {"always": True, "report": False, "seed": 7, "tuning": tuning}
    assert taken == [ExtensionSettings(methods="ntk", factor=2.5, **chosen)]


# Help says each default; progress says how long the rest takes.


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_its_default(command: str) -> None:
    for argument in arguments_of(command):
        if argument.index is None and not argument.children and not argument.is_flag():
            assert argument.show_default, argument.name
            if callable(argument.show_default):
                assert argument.show_default(argument.field_info.default), argument.name


class Clock:
    """A clock that goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left() -> None:
    clock = Clock()
    countdown = Countdown(clock)
    assert countdown.left(0, 10) == ""
    clock.now = 4.0
    assert countdown.left(1, 10) == "about 36 s left"
    clock.now = 40.0
    assert countdown.left(2, 10) == "about 3 min left"
    assert countdown.left(10, 10) == ""
    assert countdown.left(0.5, 10) == "", "another stage begins"
    clock.now = 41.0
    assert countdown.left(1.0, 10) == "about 18 s left"
    countdown.restart(5.0)
    clock.now = 43.0
    assert countdown.left(5.002, 10) == "", "a first step says nothing of the others"
    assert countdown.left(5.02, 10) == "about 8 min left", "what was done before took no time"


RUN = {"encoding": "rope", "seed": 0}
STEPPED = progress.Stepped(**RUN, step=0, steps=1000, loss=1.0, tokens_per_second=1.0)


def begin(
    display: CompareDisplay, runs: tuple[tuple[str, int], ...], *, steps: int, workers: int = 2
) -> None:
    about = {"task": "", "title": "T", "data": "d", "out": Path("out")}
    display(progress.RunsPrepared(runs=runs, finished=0, workers=workers, **about))
    display(progress.RunStarted(**RUN, step=0, steps=steps))


def test_the_whole_comparison_has_an_estimate_from_the_first_steps_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    display = CompareDisplay(shown=True)
    display.countdown = Countdown(clock)
    runs = tuple((name, seed) for name in ("rope", "alibi") for seed in (0, 1))
    begin(display, runs, steps=100)
    clock.now = 2.0
    display(replace(STEPPED, step=10, steps=100))
    (whole,) = (task for task in display.bars.tasks if task.description == "all runs")
    assert whole.completed == pytest.approx(0.08)
    assert whole.fields["note"] == "about 2 min left", "98 s"
    clock.now = 25.0
    display(progress.RunFinished(encoding="rope", seed=0, finished=1, runs=4, seconds=25.0))
    assert re.search(r"\[1/4\] rope, seed 0: 25.0 s, about 75 s left", capsys.readouterr().err)


def test_a_run_whose_process_died_has_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    display = CompareDisplay(shown=True)
    begin(display, (("rope", 0),), steps=1000)
    display(progress.Restarted(**RUN, reason="killed by signal 9"))
    display(progress.RunStarted(**RUN, step=500, steps=1000))
    assert [task.description for task in display.bars.tasks] == ["all runs", "rope, seed 0"]
    told = " ".join(capsys.readouterr().err.split())
    assert "rope, seed 0: killed by signal 9; another process continues it." in told


def test_without_a_terminal_lines_say_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first run is finished, and seldom."""
    clock = Clock()
    display = CompareDisplay(shown=True)
    display.live, display.countdown = False, Countdown(clock)
    begin(display, (("rope", 0), ("alibi", 0)), steps=1000, workers=1)
    for second in range(1, 100):
        clock.now = float(second)
        display(replace(STEPPED, step=second))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "left" in line] == ["About 42 min left", "About 41 min left"]
