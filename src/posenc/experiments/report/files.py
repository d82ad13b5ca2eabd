"""A report's folder: the page, its charts as pictures, the numbers as tables."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from posenc.experiments.gates import reason
from posenc.experiments.report.charts import draw_charts
from posenc.experiments.report.page import render_page
from posenc.experiments.results import Comparison
from posenc.experiments.summary import Summary, summarise
from posenc.storage import output_folder, write_bytes
from posenc.visualization.charts import Chart, picture_files

FIRST = 10.0
"""Seconds before the first live report."""

PAUSE = 19.0
"""Least time between two live reports, in times that the first of them took."""


@dataclass(frozen=True)
class ReportFiles:
    """Paths of a written report.

    Args:
        folder: all of it.
        page: the page to open.
        pictures: charts as PNG and SVG.
        tables: comparison.json, measurements.csv and summary.csv.
    """

    folder: Path
    page: Path
    pictures: tuple[Path, ...]
    tables: tuple[Path, ...]


def write_report(
    comparison: Comparison, folder: Path | str, *, overwrite: bool = False
) -> ReportFiles:
    """Write the report of ``comparison`` into a new folder, whole or not at all.

    Args:
        comparison: what to report.
        folder: where to; made if it is not there.
        overwrite: replace what the folder holds.

    Raises:
        OutputError: when the folder holds something and ``overwrite`` is False, or cannot be
            written to, or the disk is full; then nothing is left behind.
    """
    folder = Path(folder)
    with output_folder(folder, "folder", overwrite=overwrite) as partial:
        summary = summarise(comparison)
        charts = draw_charts(comparison, summary)
        for name, content in _contents(comparison, summary, charts):
            write_bytes(partial / name, content)
    pictures = [f"{chart.key}.{kind}" for chart in charts for kind in ("png", "svg")]
    tables = ("comparison.json", "measurements.csv", "summary.csv")
    return ReportFiles(
        folder,
        folder / "index.html",
        tuple(folder / name for name in pictures),
        tuple(folder / name for name in tables),
    )


class LiveReport:
    """Writes the report of a comparison anew as its runs finish, in a twentieth of the time.

    Several processes may do so at once.

    Args:
        folder: of the report.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due = time.monotonic() + FIRST

    def __call__(self, comparison: Comparison) -> None:
        """Write the report, or leave it out if the last is too recent; errors as write_report."""
        began = time.monotonic()
        if began >= self._due:
            write_report(comparison, self._folder, overwrite=True)
            now = time.monotonic()
            self._due = now + PAUSE * (now - began)


def _contents(
    comparison: Comparison, summary: Summary, charts: list[Chart]
) -> Iterable[tuple[str, bytes]]:
    yield "index.html", render_page(comparison, summary, charts).encode()
    yield from picture_files(charts)
    plain = json.dumps(comparison.to_json(), indent=1)
    yield "comparison.json", f"{plain}\n".encode()
    yield "measurements.csv", comparison.frame().to_csv(index=False).encode()
    yield "summary.csv", _summary_table(comparison, summary).encode()


def _summary_table(comparison: Comparison, summary: Summary) -> str:
    """A line per subject: verdicts, estimates by length, and costs."""
    lengths, key = comparison.test_lengths, comparison.headline.key
    recalled = lengths if comparison.metric("recall") is not None else ()
    columns = [f"{key}@{n}" for n in lengths] + [f"recall@{n}" for n in recalled]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["rank", "subject", "role", "verdict", "predicts", "finds"]
        + [f"{column}{end}" for column in columns for end in ("", "_low", "_high")]
        + ["tokens_per_second", "peak_memory_bytes", "parameters", "reason"]
    )
    for row in summary.rows:
        estimates = [row.values.get(n) for n in lengths] + [row.recall.get(n) for n in recalled]
        values: list[object] = [row.rank, row.subject.name, row.subject.role]
        values += [row.verdict, row.predicts, row.finds]
        for estimate in estimates:
            plain = {} if estimate is None else estimate.to_json()
            values += [plain.get(end) for end in ("mean", "low", "high")]
        values += [row.tokens_per_second, row.peak_memory_bytes, row.parameters]
        table.writerow([*values, reason(comparison, row)])
    return text.getvalue()
