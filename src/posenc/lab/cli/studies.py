"""Studies on a terminal: their progress, and their findings as sentences and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, TimeElapsedColumn
from rich.text import Text

from posenc.lab.cli.console import (
    OUT,
    Countdown,
    Display,
    PlainTextColumn,
    new_table,
    print_opening,
)

if TYPE_CHECKING:
    from posenc.lab.evaluation.results import Study, StudyMetric


def print_study(study: Study) -> None:
    """The verdict and a table, the best at the longest context first."""
    from posenc.lab.evaluation.headline import opening
    from posenc.lab.evaluation.summary import answer, findings

    OUT.print()
    for sentence in answer(study):
        OUT.print(Text(sentence))
    for title, sentences in findings(study):
        OUT.print(Text(f"\n{title}", "dim"))
        for sentence in sentences:
            OUT.print(Text(sentence))
    for tuned in reversed(study.whens):
        table = new_table()
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
    _print_answers(study)
    for method in study.findings:
        if method.refusal:
            OUT.print(Text(f"{method.key} does not go: {method.refusal}.", "dim"))
    print_opening(opening(study))


def _print_answers(study: Study) -> None:
    """The share of right answers by task and length, of a model measured as it is."""
    tasks = study.answers
    if not tasks:
        return
    table = new_table()
    table.add_column("task", style="bold", no_wrap=True)
    for length in study.asked_at:
        table.add_column(f"at {study.called(length)}", justify="right")
    for name, shares in tasks.items():
        cells = [f"{shares[n]:.0%}" if n in shares else "" for n in study.asked_at]
        table.add_row(name, *cells)
    OUT.print(Text("\nQuestions answered right", "dim"))
    OUT.print(table)


def study_json(study: Study) -> dict[str, Any]:
    """The numbers of a study, with its findings in words."""
    from posenc.lab.evaluation.headline import opening
    from posenc.lab.evaluation.summary import answer

    return opening(study).to_json() | {"answer": answer(study)} | study.to_json()


def _shown(study: Study, metric: StudyMetric) -> tuple[int, ...]:
    """Lengths in the table: all for the deciding metric, the last for others."""
    return study.lengths if metric == study.deciding else study.lengths[-1:]


class StudyDisplay(Display):
    """A bar on a terminal, elsewhere a line for each model."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            PlainTextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            PlainTextColumn("{task.fields[left]}"),
            PlainTextColumn("{task.description}", style="dim"),
            shown=shown,
        )
        self.shown_stage = ""
        self.task = self.bars.add_task("", total=1.0, left="")
        self.countdown = Countdown()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the current stage, and how much of all is done."""
        left = self.countdown.left(done / total, 1.0)
        if self.live:
            self.bars.update(self.task, completed=done / total, description=stage, left=left)
            return
        brief = stage.partition(", step")[0]
        if brief != self.shown_stage:
            self.shown_stage = brief
            self.emit(f"[{done}/{total}] {brief}" + (f", {left}" if left else ""))
