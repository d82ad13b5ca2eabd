"""Studies on a terminal: their progress, and their findings as sentences and a table."""

from __future__ import annotations

import shlex
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from posenc.cli.console import ERRORS, OUT, Countdown, Words

if TYPE_CHECKING:
    from posenc.evaluation.results import Metric, Study

__all__ = ["Display", "command_line", "print_study"]


def command_line() -> str:
    """The command that is running, as a shell takes it."""
    return shlex.join(["posenc", *sys.argv[1:]])


def print_study(study: Study) -> None:
    """The verdict and a table, the best at the longest context first."""
    from posenc.evaluation.verdict import findings, headline

    OUT.print()
    for sentence in headline(study):
        OUT.print(Text(sentence, "bold" if sentence == headline(study)[0] else ""))
    for title, sentences in findings(study):
        OUT.print(Text(f"\n{title}", "dim"))
        for sentence in sentences:
            OUT.print(Text(sentence))
    for tuned in (False, True) if study.tuned else (False,):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("method", style="bold", no_wrap=True)
        for metric in study.metrics:
            for length in _shown(study, metric):
                deciding = metric == study.deciding
                name = f"at {study.called(length)}" if deciding else metric.name
                table.add_column(name, justify="right")
        table.add_column(f"{study.counted}/s", justify="right")
        for method, reading in study.ranked(tuned=tuned):
            values = [
                metric.shown(reading.of(metric)[length])
                for metric in study.metrics
                for length in _shown(study, metric)
            ]
            table.add_row(method.key, *values, reading.speed)
        when = ", after fine-tuning" if tuned else ", without training" if study.tuned else ""
        title = f"\n{study.deciding.name.capitalize()}, {study.deciding.axis}{when}"
        if len(study.metrics) > 1:
            title += f"; the others at {study.called(study.goal)}"
        OUT.print(Text(title, "dim"))
        OUT.print(table)
    for method in study.findings:
        if method.refusal:
            OUT.print(Text(f"{method.key} does not go: {method.refusal}.", "dim"))


def _shown(study: Study, metric: Metric) -> tuple[int, ...]:
    """Lengths in the table: all for the deciding metric, the last for others."""
    return study.lengths if metric == study.deciding else study.lengths[-1:]


class Display:
    """A bar on a terminal, elsewhere a line for each model."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.live = shown and ERRORS.is_terminal
        self.shown_stage = ""
        self.bar = Progress(
            Words("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            Words("{task.fields[left]}"),
            Words("{task.description}", style="dim"),
            console=ERRORS,
            disable=not self.live,
            transient=True,
        )
        self.task: TaskID = self.bar.add_task("", total=1.0, left="")
        self.countdown = Countdown()

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the current stage, and how much of all is done."""
        left = self.countdown.left(done / total, 1.0)
        if self.live:
            self.bar.update(self.task, completed=done / total, description=stage, left=left)
            return
        brief = stage.partition(", step")[0]
        if self.shown and brief != self.shown_stage:
            self.shown_stage = brief
            ending = f", {left}" if left else ""
            ERRORS.print(f"[{done}/{total}] {brief}{ending}", markup=False)
