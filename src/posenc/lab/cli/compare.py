"""``posenc compare``: train small models, test them on longer inputs, write a report."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token
from rich.progress import BarColumn, TaskID
from rich.text import Text

from posenc.errors import ArgumentError
from posenc.lab.cli.console import (
    ERRORS,
    OUT,
    Countdown,
    Display,
    PlainTextColumn,
    command_line,
    print_json,
    print_report,
    print_study,
)
from posenc.lab.cli.options import (
    PLACE,
    SEVERAL_ENCODINGS,
    TASK,
    FromFile,
    Json,
    Quiet,
    with_settings,
)
from posenc.lab.experiments import ComparisonOptions
from posenc.lab.stores import StorePath, working_folder
from posenc.registration import parse_option, parse_options

if TYPE_CHECKING:
    from posenc.lab.experiments.progress import Event, RunEvent, RunFinished
    from posenc.lab.experiments.results import Comparison
    from posenc.lab.experiments.settings import ComparisonSettings


def _seeds(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Seeds from a number (``3``) or a list (``0,1,2``)."""
    text = tokens[-1].value
    kind = inspect.Parameter.KEYWORD_ONLY
    parameter = inspect.Parameter("seeds", kind, default=3, annotation=Sequence[int])
    values: tuple[int, ...] = parse_option("--seeds", parameter, text)
    if "," in text or not values:
        return values
    if values[0] < 1:
        raise ArgumentError(
            "--seeds", expected="1 or more", got=values[0], remedy="Use 3 or more for an interval."
        )
    return tuple(range(values[0]))


@with_settings(
    ComparisonOptions, seeds=Parameter(converter=_seeds), encodings=SEVERAL_ENCODINGS, task=TASK
)
def compare(
    *,
    fields: dict[str, Any] | None = None,
    task_options: Annotated[
        list[str] | None,
        Parameter(name="--option", help="Task option KEY=VALUE; repeatable.", show_default="none"),
    ] = None,
    out: Annotated[
        PurePath, PLACE, Parameter(help="Folder for runs and report, here or on a store.")
    ] = Path("posenc-compare"),
    resume: Annotated[bool, Parameter(help="Continue the comparison in --out.")] = False,
    replace: Annotated[bool, Parameter(help="Replace the comparison in --out.")] = False,
    launch: Annotated[
        str | None,
        Parameter(
            help="Carry out the runs as jobs of slurm, local (submitit) or ray.",
            show_default="processes",
        ),
    ] = None,
    launch_options: Annotated[
        list[str] | None,
        Parameter(
            name="--launch-option",
            help="Option of these jobs, KEY=VALUE; repeatable.",
            show_default="none",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    file: FromFile | None = None,
) -> None:
    """Train a small model per encoding, test all on longer inputs, and write a report.

    All models have the same budget, data order and initial weights. Defaults depend on the task
    (see posenc tasks). Ctrl-C finishes the step, saves, and prints the command to continue.
    --launch hands the runs to a cluster whose machines see the folder.

    Examples:

        posenc compare

        posenc compare --text book.txt --encodings rope,alibi,kerple --out book

        posenc compare --task copy --encodings t5,shaw@max_distance=0

        posenc compare --minutes 30 --width 128 --layers 4

        posenc compare --resume --out book

        posenc compare --out /shared/book --launch slurm --workers 8
    """
    existing = {"resume": resume, "replace": replace}
    from posenc.lab.experiments.compare import compare as carry_out
    from posenc.lab.experiments.executors import cluster_executor
    from posenc.lab.experiments.page import opening, results_table
    from posenc.lab.experiments.report import LiveReport, write_report
    from posenc.lab.experiments.report import numbers as numbers_of
    from posenc.lab.experiments.settings import resume_command
    from posenc.lab.experiments.summary import summarise

    given = _launch_options(launch_options or [])
    _require_reachable(out, launch)
    with working_folder(out) as folder:
        settings = _settings(folder, fields or {}, task_options or [], existing=existing)
        executor = None if launch is None else cluster_executor(launch, folder, given)
        live = LiveReport(folder / "report")
        with CompareDisplay(shown=not quiet and not json) as display:
            comparison = carry_out(
                settings, command=command_line(), progress=display, interim=live, executor=executor
            )
        write_report(comparison, folder / "report", overwrite=True)
    page = out / "report" / "index.html"
    summary, metric = summarise(comparison), comparison.headline
    opened = opening(comparison, summary)
    if json:
        print_json(
            {
                "complete": comparison.complete,
                **opened.to_json(),
                "answer": list(summary.answer),
                "report": str(page),
                "comparison": str(page.with_name("comparison.json")),
                "metric": {"key": metric.key, "unit": metric.unit},
                "encodings": numbers_of(comparison, summary, out=out),
            }
        )
    else:
        shown = opened if comparison.complete else dataclasses.replace(opened, remedies=())
        print_study(shown, [results_table(comparison, summary)], summary.answer)
        _print_models(comparison, out)
        print_report(page, gap="")
    if not comparison.complete:
        again = resume_command(out)
        ERRORS.print(f"Interrupted. To continue: {again}", style="yellow", soft_wrap=True)
        sys.exit(130)


def _require_reachable(out: PurePath, launch: str | None) -> None:
    """Refuse a folder that the machines of a cluster do not see."""
    if isinstance(out, StorePath) and launch in ("slurm", "ray"):
        raise ArgumentError(
            "launch",
            expected=f"none, for {out}, which is copied from and to this machine",
            got=launch,
            remedy="Choose a folder that all machines share.",
        )


def _launch_options(options: list[str]) -> dict[str, Any]:
    """Values by name: JSON where they are, else texts."""
    from posenc.storage import parse_json

    values: dict[str, Any] = {}
    for item in options:
        key, equals, text = item.partition("=")
        if not equals:
            raise ArgumentError(
                "--launch-option",
                expected="KEY=VALUE",
                got=repr(item),
                remedy="Write --launch-option timeout_min=60, for example.",
            )
        try:
            values[key] = parse_json(text)
        except ValueError:
            values[key] = text
    return values


def _settings(
    out: Path, fields: dict[str, Any], options: list[str], *, existing: dict[str, bool]
) -> ComparisonSettings:
    from posenc.lab.experiments.settings import ComparisonSettings, load_settings
    from posenc.lab.experiments.tasks import TASKS

    requested = [name for name, value in existing.items() if value]
    if len(requested) > 1:
        several = ", ".join(f"--{name}" for name in existing)
        raise ArgumentError(
            f"--{requested[0]}", expected=f"one of {several}", got="both", remedy="Remove one."
        )
    way: Any = requested[0] if requested else "refuse"
    stored = load_settings(out) if way == "resume" else None
    task = fields.get("task", ComparisonSettings.task if stored is None else stored.task)
    if options and task in TASKS:
        fields["options"] = parse_options(options, TASKS[task].parameters(), of=task)
    if stored is not None:
        return dataclasses.replace(stored, **fields)
    return ComparisonSettings(out=out, existing=way, **fields)


def _print_models(comparison: Comparison, out: PurePath) -> None:
    """Print the folder of the trained models, and the command to extend a language model."""
    from posenc.lab.experiments.report import models

    if not comparison.runs:
        return
    OUT.print(Text(f"\nModels: {out / 'runs'}/ENCODING/seed-N/model"), soft_wrap=True)
    for folder in models(comparison, out, "rope")[:1] if comparison.task == "language" else ():
        command = shlex.join(["posenc", "extend", str(folder), "--method", "all"])
        OUT.print(Text(f"To extend one to longer contexts: {command}"), soft_wrap=True)


TRAINING = 0.8
"""Assumed share of training in a run's time; the rest is measuring."""


FIRST_LINE = 10.0
"""Seconds after which the time left is printed for the first time without a terminal."""


class CompareDisplay(Display):
    """Prints the events of a comparison: bars on a terminal, else lines.

    Without a terminal there is a line for each finished run, and one on the time that is left after
    10 seconds, after four times as many, and so on.
    """

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            PlainTextColumn("{task.description}"),
            BarColumn(bar_width=24),
            PlainTextColumn("{task.percentage:>3.0f}%"),
            PlainTextColumn("{task.fields[note]}", style="dim"),
            shown=shown,
        )
        self.resume: str | None = None
        self.tasks: dict[tuple[str, int], TaskID] = {}
        self.shares: dict[tuple[str, int], float] = {}
        self.finished = self.runs = 0
        self.countdown = Countdown()
        self.next_line = FIRST_LINE
        self.total: TaskID | None = None

    def __call__(self, event: Event) -> None:
        from posenc.lab.experiments import progress

        match event:
            case progress.RunsPrepared():
                self.emit(f"{event.title}: {event.data}")
                again = f", {event.finished} finished before" if event.finished else ""
                runs = f"{len(event.runs)} runs{again}, {event.workers} at a time, into {event.out}"
                self.emit(runs, "dim")
                total = len(event.runs)
                self.total = self.bars.add_task("all runs", total=total, note="")
                self.finished, self.runs = event.finished, total
                self.countdown.restart(event.finished)
                self._advance()
            case progress.Paced():
                fit = f"{event.steps} steps per run fit the budget"
                self.emit(f"{fit}, about {event.seconds / 60:.1f} minutes.")
            case progress.RunStarted():
                key = (event.encoding, event.seed)
                name = f"{event.encoding}, seed {event.seed}"
                before = TRAINING * event.step / event.steps
                self.shares[key] = before
                self.countdown.start += before
                self.countdown.done += before
                self.tasks[key] = self.bars.add_task(name, total=1.0, note="starting")
            case progress.Stepped():
                note = f"loss {event.loss:.3f}  {event.tokens_per_second / 1000:.0f} k tokens/s"
                self._move(event, TRAINING * event.step / event.steps, note)
            case progress.Measuring():
                share = TRAINING + (1 - TRAINING) * event.done / event.total
                self._move(event, share, f"measuring {event.subject}")
            case progress.RunFinished():
                self._finish(event)
            case progress.Restarted():
                self._drop(event)
                name = f"{event.encoding}, seed {event.seed}"
                self.emit(f"{name}: {event.reason}; another process continues it.", "yellow")
            case progress.Stopping():
                self.resume = event.resume
                why = "The budget is over" if event.over_budget else "Stopping"
                self.emit(f"{why}: each worker finishes its step and saves.", "yellow")
            case progress.Finished():
                self.resume = event.resume or self.resume
                self.emit(f"{event.finished} of {event.runs} runs in {event.seconds:.0f} s", "dim")

    def _move(self, event: RunEvent, share: float, note: str) -> None:
        key = (event.encoding, event.seed)
        if key in self.tasks:
            self.bars.update(self.tasks[key], completed=share, note=note)
            self.shares[key] = share
            left = self._advance()
            if left and not self.live and self.countdown.elapsed() >= self.next_line:
                self.emit(f"{left[0].upper()}{left[1:]}", "dim")
                self.next_line = 4 * self.countdown.elapsed()

    def _advance(self) -> str:
        """Update the bar of all runs; returns the time left."""
        done = self.finished + sum(self.shares.values())
        left = self.countdown.left(done, self.runs)
        if self.total is not None:
            self.bars.update(self.total, completed=done, note=left)
        return left

    def _drop(self, event: RunEvent) -> None:
        """Remove the bar of a run."""
        key = (event.encoding, event.seed)
        if key in self.tasks:
            self.bars.remove_task(self.tasks.pop(key))
        self.shares.pop(key, None)

    def _finish(self, event: RunFinished) -> None:
        self._drop(event)
        self.finished = event.finished
        left = self._advance()
        done = f"[{event.finished:>{len(str(event.runs))}}/{event.runs}]"
        ending = f", {left}" if left else ""
        self.emit(f"{done} {event.encoding}, seed {event.seed}: {event.seconds:.1f} s{ending}")
