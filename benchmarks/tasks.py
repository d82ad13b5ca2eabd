"""Every lab task with its encodings, by the command line, and the tables of docs/results.

    python -m benchmarks.tasks [--runs copy scan ...] [--out posenc-tasks] [--workers 2]

A run is one ``posenc compare``; runs that were begun in OUT go on, finished ones are read. What
each measured is kept in benchmarks/results/tasks/<run>.csv, a row an encoding, metric and length
(mean and half width of the 95 % interval over seeds); the tables are made of them.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from benchmarks.measuring import filled
from benchmarks.number_words import write_numbers

from posenc.lab.experiments.results import Comparison
from posenc.lab.reporting.judge import HIGHEST
from posenc.lab.reporting.numbers import Bounds, Estimate, estimate

ROOT = Path(__file__).parent
KEPT = ROOT / "results" / "tasks"
PAGES = ROOT.parent / "docs" / "results"
"""Folder of a page a task."""

COLUMNS = ("subject", "role", "metric", "label", "unit", "length", "seeds", "mean", "half_width")

OF_FRAMES = ("direct", "ntk", "riflex", "interpolate", "ultravico")
"""Errors of the task of frames, by the method for the axis of time."""

ERROR_SHARES = ("error", "word_errors", *OF_FRAMES)
"""Shares that may exceed one."""


@dataclass(frozen=True)
class Run:
    """One comparison.

    Args:
        task: of the lab.
        arguments: of ``posenc compare``, besides task and folder.
        shown: metrics that the page has tables of.
    """

    task: str
    arguments: str
    shown: tuple[str, ...]


ACCURACIES = ("token_accuracy", "accuracy")
VIEWS = ("scaled", "fitted", "moved", "padded")
RUNS = {
    "copy": Run(
        "copy",
        "--encodings rope,alibi,t5,shaw,sinusoidal,sinusoidal@randomized --test-lengths 24,32,64",
        ACCURACIES,
    ),
    "copy-longer": Run(
        "copy", "--encodings t5,alibi,shaw --steps 2500 --test-lengths 24,32", ACCURACIES
    ),
    "recall": Run(
        "recall",
        "--encodings rope,alibi,t5,sinusoidal --option keys=64 --learning-rate 0.002 "
        "--test-lengths 16,32,64",
        ACCURACIES,
    ),
    "reverse": Run(
        "reverse",
        "--encodings rope,alibi,t5,sinusoidal --train-length 8 --test-lengths 12,16,32",
        ACCURACIES,
    ),
    "digits": Run("digits", "", VIEWS),
    "digits-apart": Run("digits", "--encodings sine2d,rope2d --option overlap=0", VIEWS[:2]),
    "digits-all-turned": Run("digits", "--encodings rope2d --option special=0", VIEWS),
    "frames": Run("frames", "", OF_FRAMES),
    "temperature": Run("temperature", "--steps 800", ("error", "degrees")),
    "masked": Run(
        "masked",
        "--encodings sinusoidal,learned,rope,alibi --steps 1000 --test-lengths 128,256",
        ("loss", "accuracy"),
    ),
    "word_order": Run("word_order", "--steps 1000", ("accuracy", "pairs")),
    "phonemes": Run(
        "phonemes",
        "--encodings sinusoidal,learned,rope,t5 --steps 600",
        ("phoneme_errors", "word_errors"),
    ),
    "scan": Run(
        "scan",
        "--encodings rope,alibi,t5,sinusoidal --steps 600 --test-lengths 24,26,30,36",
        ACCURACIES,
    ),
    "addition": Run(
        "addition", "--encodings rope,t5,sinusoidal --steps 800 --test-lengths 12,16", ACCURACIES
    ),
    "parity": Run(
        "parity", "--encodings rope,alibi,t5,sinusoidal --test-lengths 24,32,64,128", ACCURACIES
    ),
    "dyck": Run(
        "dyck", "--encodings rope,alibi,t5,sinusoidal --test-lengths 32,64,128", ACCURACIES
    ),
    "sorting": Run(
        "sorting",
        "--encodings rope,alibi,t5,sinusoidal --train-length 8 --test-lengths 12,16,32",
        ACCURACIES,
    ),
    "translation": Run(
        "translation",
        "--text numbers.tsv --option vocabulary=300 --encodings sinusoidal,rope,shaw --steps 400",
        ("bleu", "chrf"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("posenc-tasks"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for name in options.runs:
        compare(name, options.out, options.workers)
        keep(name, options.out / name / "report" / "comparison.json")
    for page, texts in parts().items():
        page.write_text(filled(page.read_text(), texts))
    print(f"Written to {PAGES}.")


def compare(name: str, out: Path, workers: int) -> None:
    """Do the run, or what is left of it."""
    if "numbers.tsv" in RUNS[name].arguments:
        write_numbers(out / "numbers.tsv")
    folder = out / name
    resume = ["--resume"] if (folder / "settings.json").exists() else []
    program = [sys.executable, "-c", "from posenc.lab.cli import main; main()"]
    arguments = shlex.split(command(name).replace("numbers.tsv", str(out / "numbers.tsv")))[1:]
    where = ["--workers", str(workers), "--out", str(folder), *resume]
    print(f"{command(name)} {shlex.join(where)}", flush=True)
    subprocess.run([*program, *arguments, *where], check=True)


def command(name: str) -> str:
    """The command line of the run."""
    return f"posenc compare --task {RUNS[name].task} {RUNS[name].arguments}".strip()


def keep(name: str, path: Path) -> None:
    """Write means and intervals of a report to benchmarks/results/tasks."""
    comparison = Comparison.from_json(json.loads(path.read_text()))
    KEPT.mkdir(parents=True, exist_ok=True)
    rows = []
    for metric in comparison.metrics:
        if metric.key == "training_loss":
            continue
        for subject in comparison.subjects:
            for length in comparison.test_lengths:
                values = comparison.values(subject.name, metric.key, length).values()
                found = estimate(values)
                mean, width = (None, None) if found is None else (found.mean, found.half_width)
                shown = [metric.key, metric.label, metric.unit, length, len(values)]
                rows.append([subject.name, subject.role, *shown, mean, width])
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.to_csv(KEPT / f"{name}.csv", index=False, float_format="%.5g")


def parts() -> dict[Path, dict[str, str]]:
    """The tables of each task's page, by run."""
    found: dict[Path, dict[str, str]] = {}
    for name, run in RUNS.items():
        if (KEPT / f"{name}.csv").exists():
            found.setdefault(PAGES / f"{run.task}.md", {})[name] = tables(name)
    return found


def tables(name: str) -> str:
    """A run as Markdown: its command, and a table a metric."""
    kept = pd.read_csv(KEPT / f"{name}.csv", dtype=str, keep_default_na=False)
    rows = kept.to_dict("records")
    seeds = sorted({int(row["seeds"]) for row in rows} - {0})
    counted = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    seeds_are = "one seed" if counted == "1" else f"{counted} seeds"
    parts = [f"\n```console\n{command(name)}\n```\n\nOver {seeds_are}:\n"]
    for key in RUNS[name].shown:
        chosen = [row for row in rows if row["metric"] == key]
        lengths = list(dict.fromkeys(row["length"] for row in chosen))
        lines = [f"| {chosen[0]['label']} at | {' | '.join(lengths)} |"]
        lines.append("|---" * (1 + len(lengths)) + "|")
        for subject in dict.fromkeys(row["subject"] for row in chosen):
            cells = [cell(row) for row in chosen if row["subject"] == subject]
            lines.append(f"| {subject.replace('|', ', ')} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) + "\n"


def cell(row: dict[str, str]) -> str:
    """A mean with its interval; shares in percent."""
    if not row["mean"]:
        return "cannot"
    share = row["unit"].startswith("share")
    half_width = float(row["half_width"]) if row["half_width"] else None
    correct = share and row["metric"] not in ERROR_SHARES
    bounds = Bounds(0.0, 1.0 if correct else HIGHEST.get(row["unit"], math.inf))
    found = Estimate(float(row["mean"]), half_width, int(row["seeds"]), bounds)
    return found.shown(".1%" if share else ".2f" if found.mean < 10 else ".1f")


if __name__ == "__main__":
    main()
