"""Help says each default and keeps commands whole; progress says how long the rest takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from posenc.lab.cli.app import app
from posenc.lab.cli.compare import CompareDisplay
from posenc.lab.cli.console import Countdown
from posenc.lab.experiments import progress


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name, each in below.items():
        yield from commands(each, *path, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_flows_and_keeps_commands_whole(path: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert told.exit_code == 0
    prose = told.output.partition("╭")[0]
    flat = [line.strip() for line in prose.splitlines()]
    for paragraph in (COMMANDS[path].help or "").split("\n\n"):
        if paragraph.strip().startswith("posenc ") and paragraph.startswith(" "):
            for line in paragraph.splitlines():
                assert line.strip() in flat, "a command is split"
    for line, following in zip(prose.splitlines(), prose.splitlines()[1:], strict=False):
        first = following.strip().split(" ")[0]
        if line.strip() and first and not following.startswith("  "):
            assert len(line.rstrip()) + 1 + len(first) > 78, f"a paragraph is broken: {line}"
            assert not line.startswith("  "), f"prose is indented: {line}"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_says_its_default(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        if parameter.param_type_name == "option" and not parameter.is_flag:
            told = isinstance(parameter.show_default, str)
            assert told or parameter.default is not None, parameter.opts


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
    assert countdown.left(5.002, 10) == "about 83 min left", "what was done before took no time"


def test_the_whole_comparison_has_an_estimate_from_the_first_steps_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    display = CompareDisplay(shown=True)
    display.countdown = Countdown(clock)
    runs = tuple((name, seed) for name in ("rope", "alibi") for seed in (0, 1))
    display(
        progress.RunsPrepared(
            task="", title="T", data="d", runs=runs, finished=0, workers=2, out=Path("out")
        )
    )
    display(progress.RunStarted(encoding="rope", seed=0, step=0, steps=100))
    clock.now = 2.0
    step = {"encoding": "rope", "seed": 0, "steps": 100, "loss": 1.0, "tokens_per_second": 1.0}
    display(progress.Stepped(step=10, **step))  # type: ignore[arg-type]
    (whole,) = (task for task in display.bars.tasks if task.description == "all runs")
    assert whole.completed == pytest.approx(0.08)
    assert whole.fields["note"] == "about 2 min left", "98 s"
    clock.now = 25.0
    display(progress.RunFinished(encoding="rope", seed=0, finished=1, runs=4, seconds=25.0))
    assert re.search(r"\[1/4\] rope, seed 0: 25.0 s, about 75 s left", capsys.readouterr().err)


def test_without_a_terminal_lines_say_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first run is finished, and seldom."""
    clock = Clock()
    display = CompareDisplay(shown=True)
    display.live, display.countdown = False, Countdown(clock)
    runs = (("rope", 0), ("alibi", 0))
    out = Path("out")
    display(
        progress.RunsPrepared(
            task="", title="T", data="d", runs=runs, finished=0, workers=1, out=out
        )
    )
    display(progress.RunStarted(encoding="rope", seed=0, step=0, steps=1000))
    for second in range(1, 100):
        clock.now = float(second)
        display(
            progress.Stepped(
                encoding="rope", seed=0, step=second, steps=1000, loss=1.0, tokens_per_second=1.0
            )
        )
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "left" in line] == ["About 42 min left", "About 41 min left"]
