"""``posenc compare``: train small models, test them on longer inputs, write a report."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from posenc.cli.compare_display import CompareDisplay
from posenc.cli.completion import complete_encodings, complete_task
from posenc.cli.console import ERRORS, OUT, print_json
from posenc.codec import parse_options
from posenc.errors import ArgumentError

if TYPE_CHECKING:
    from posenc.experiments.results import Comparison, Metric
    from posenc.experiments.settings import Settings
    from posenc.experiments.statistics import Estimate
    from posenc.experiments.summary import Summary

__all__ = ["compare"]

BY_TASK = "the task's"
"""Displayed default of an option whose default depends on the task."""

VERDICT_STYLES = {
    "holds": "green",
    "degrades": "yellow",
    "breaks": "red",
    "unsure": "yellow",
    "learned": "green",
    "tied": "magenta",
    "unlearned": "magenta",
    "overfitted": "magenta",
    "untestable": "dim",
    "unfinished": "dim",
}


def compare(
    task: Annotated[
        str | None,
        typer.Option(
            show_default="language",
            help="Task to train on (see posenc tasks).",
            autocompletion=complete_task,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(show_default="none", help="Task option KEY=VALUE; repeatable."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            show_default="posenc's own source", help="Text file or folder for task language."
        ),
    ] = None,
    encodings: Annotated[
        str | None,
        typer.Option(
            show_default=BY_TASK,
            help="Encodings: rope,t5+fourier,t5@buckets=16.",
            autocompletion=complete_encodings,
        ),
    ] = None,
    train_length: Annotated[
        int | None,
        typer.Option(show_default=BY_TASK, help="Training length, in bytes or the task's unit."),
    ] = None,
    test_lengths: Annotated[
        str | None,
        typer.Option(
            show_default="the task's multiples of --train-length",
            help="Test lengths, comma-separated.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(show_default=BY_TASK, help="Training steps per run.")
    ] = None,
    budget_minutes: Annotated[
        float | None,
        typer.Option(show_default="none", help="Set the steps to fit this total time."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(show_default="3", help="Number of seeds, or a list (0,1,2).")
    ] = None,
    width: Annotated[int | None, typer.Option(show_default=BY_TASK, help="Model width.")] = None,
    layers: Annotated[
        int | None, typer.Option(show_default=BY_TASK, help="Number of blocks.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(show_default=BY_TASK, help="Attention heads.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(show_default=BY_TASK, help="Sequences per step.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(show_default=BY_TASK, help="Peak learning rate.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(show_default="cpu", help="Device: cpu, cuda, cuda:N or mps.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(show_default="32-true", help="Precision: 32-true or bf16-mixed.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(show_default="one per core", help="Parallel processes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("posenc-compare"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the comparison in --out.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Train a small model per encoding, test all on longer inputs, and write a report.

    All models have the same budget, data order and initial weights. Defaults depend on the task
    (see posenc tasks). Ctrl-C finishes the step, saves, and prints the command to continue.

    Examples:

        posenc compare

        posenc compare --text book.txt --encodings rope,alibi,kerple --out book

        posenc compare --task copy --encodings t5,shaw@max_distance=0

        posenc compare --budget-minutes 30 --width 128 --layers 4

        posenc compare --resume --out book
    """
    fields = {
        "task": task,
        "text": text,
        "encodings": None if encodings is None else _names(encodings),
        "train_length": train_length,
        "test_lengths": None if test_lengths is None else _numbers("--test-lengths", test_lengths),
        "steps": steps,
        "budget_minutes": budget_minutes,
        "seeds": None if seeds is None else _seeds(seeds),
        "width": width,
        "layers": layers,
        "heads": heads,
        "batch": batch,
        "learning_rate": learning_rate,
        "device": device,
        "precision": precision,
        "workers": workers,
    }
    settings = _settings(
        out,
        {k: v for k, v in fields.items() if v is not None},
        option or [],
        resume=resume,
        replace=replace,
    )
    from posenc.experiments.compare import compare as carry_out
    from posenc.experiments.json_summary import numbers
    from posenc.experiments.report import write_report
    from posenc.experiments.summary import summarise

    command = shlex.join(["posenc", *sys.argv[1:]])
    with CompareDisplay(shown=not quiet and not json) as display:
        comparison = carry_out(settings, command=command, progress=display)
    report = write_report(comparison, out / "report", overwrite=True)
    summary, metric = summarise(comparison), comparison.headline
    if json:
        print_json(
            {
                "complete": comparison.complete,
                "answer": list(summary.answer),
                "report": str(report.page),
                "comparison": str(report.folder / "comparison.json"),
                "metric": {"key": metric.key, "unit": metric.unit},
                "encodings": numbers(comparison, summary, out=out),
            }
        )
    else:
        _print_summary(comparison, summary)
        _print_models(comparison, summary, out)
        OUT.print(Text.assemble("\nReport: ", (str(report.page.resolve()), "bold")), soft_wrap=True)
    if not comparison.complete:
        ERRORS.print(f"Interrupted. To continue: {display.resume}", style="yellow", soft_wrap=True)
        raise typer.Exit(130)


def _settings(
    out: Path, fields: dict[str, Any], options: list[str], *, resume: bool, replace: bool
) -> Settings:
    from posenc.experiments.output import load_settings
    from posenc.experiments.settings import Settings
    from posenc.experiments.tasks import TASKS

    if resume and replace:
        raise ArgumentError(
            "--resume", expected="--resume or --replace", got="both", remedy="Remove one."
        )
    stored = load_settings(out) if resume else None
    task = fields.get("task", Settings.task if stored is None else stored.task)
    if options and task in TASKS:
        fields["options"] = parse_options(options, TASKS[task].parameters(), of=task)
    if stored is not None:
        return dataclasses.replace(stored, **fields)
    return Settings(out=out, existing="replace" if replace else "refuse", **fields)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(_number(option, item) for item in _names(text))


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(
            option, expected="whole numbers", got=repr(text), remedy="Write 64,128, for example."
        ) from None


def _seeds(text: str) -> tuple[int, ...]:
    """Seeds from a number (``3``) or a list (``0,1,2``)."""
    numbers = _numbers("--seeds", text)
    if "," in text:
        return numbers
    if numbers and numbers[0] < 1:
        raise ArgumentError(
            "--seeds", expected="1 or more", got=numbers[0], remedy="Use 3 or more for an interval."
        )
    return tuple(range(numbers[0])) if numbers else ()


def _print_summary(comparison: Comparison, summary: Summary) -> None:
    OUT.print()
    for sentence in summary.answer:
        OUT.print(Text(sentence))
    metric, lengths = comparison.headline, comparison.test_lengths
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("encoding", style="bold")
    table.add_column("verdict")
    for length in lengths:
        table.add_column(f"at {length}", justify="right", no_wrap=True)
    recalled = sorted({length for row in summary.rows for length in row.recall})[-1:]
    for length in recalled:
        table.add_column(f"recall at {length}", justify="right", no_wrap=True)
    for row in summary.rows:
        cells: Sequence[str] = [
            "cannot"
            if length in row.refusals
            else "—"
            if length not in row.values
            else _value(row.values[length], metric)
            for length in lengths
        ]
        recall = [_share(row.recall[n]) if n in row.recall else "—" for n in recalled]
        verdict = Text(row.verdict, VERDICT_STYLES[row.verdict])
        table.add_row(str(row.rank or "–"), row.subject.label, verdict, *cells, *recall)
    OUT.print()
    OUT.print(Text(f"{metric.label}, {metric.unit}, ± 95 % over seeds", "dim"))
    OUT.print(table)


def _print_models(comparison: Comparison, summary: Summary, out: Path) -> None:
    """Print the folder of the trained models, and the command to extend a language model."""
    from posenc.experiments.json_summary import models

    if not comparison.runs:
        return
    OUT.print(Text(f"\nModels: {out / 'runs'}/ENCODING/seed-N/model"), soft_wrap=True)
    names = [row.subject.name for row in summary.rows if row.subject.name == "rope"]
    for name in names if comparison.task == "language" else ():
        for folder in models(comparison, out, name)[:1]:
            command = shlex.join(["posenc", "extend", str(folder), "--method", "all"])
            OUT.print(Text(f"To extend one to longer contexts: {command}"), soft_wrap=True)


def _share(value: Estimate) -> str:
    spread = "" if value.half_width is None else f" ±{value.half_width:.0%}"
    return f"{value.mean:.0%}{spread}"


def _value(value: Estimate, metric: Metric) -> str:
    form = ".1%" if metric.is_share else ".3f"
    spread = "" if value.half_width is None else f" ±{value.half_width:{form}}"
    return f"{value.mean:{form}}{spread}"
