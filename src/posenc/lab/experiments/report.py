"""A report's folder: the page, its charts as pictures, the numbers as tables and as JSON."""

from __future__ import annotations

import time
from pathlib import Path, PurePath
from typing import Any

from posenc.lab.experiments.page import comparison_page
from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import Summary, summarise
from posenc.lab.experiments.verdicts import Row, reason
from posenc.lab.folders import output_folder
from posenc.lab.reporting.numbers import Estimate
from posenc.lab.reporting.page import write_files

FIRST = 10.0
"""Seconds before the first live report."""

PAUSE = 19.0
"""Least time between two live reports, in times that the first of them took."""


def write_report(comparison: Comparison, folder: Path | str, *, overwrite: bool = False) -> Path:
    """Write the report of ``comparison`` into a new folder, whole or not at all.

    That is ``index.html``, every chart as PNG and SVG, comparison.json and measurements.csv.

    Args:
        comparison: what to report.
        folder: where to; made if it is not there.
        overwrite: replace what the folder holds.

    Returns:
        The path of the page.

    Raises:
        OutputError: when the folder holds something and ``overwrite`` is False, or cannot be
            written to, or the disk is full; then nothing is left behind.
    """
    folder = Path(folder)
    with output_folder(folder, "folder", overwrite=overwrite) as partial:
        summary = summarise(comparison)
        page = comparison_page(comparison, summary)
        write_files(partial, page, {"comparison.json": comparison.to_json()})
    return folder / "index.html"


class LiveReport:
    """Writes the report of a comparison anew as its runs finish, in a twentieth of the time.

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


def numbers(comparison: Comparison, summary: Summary, *, out: PurePath) -> list[dict[str, Any]]:
    """A record for each encoding, in the order of the table.

    Each has its rank, ``verdict``, ``gate`` (why there is no verdict, or null) and its ``reason``
    in a sentence, verdicts by what it ``predicts`` and ``finds``, the change from the training
    length, and for every length the estimates of the headline metric and of recall (``mean``,
    ``low`` and ``high`` end of the 95 % interval, ``n`` seeds) or why there are none
    (``refusal``).

    Args:
        comparison: the records.
        summary: of it.
        out: folder of the comparison.
    """
    return [_record(comparison, row, out) for row in summary.rows]


def models(comparison: Comparison, out: PurePath, subject: str) -> list[PurePath]:
    """Folders of the trained models of a subject, the first seed first.

    Args:
        comparison: the records.
        out: folder of the comparison.
        subject: an encoding, or one as it is looked at in another way (``rope|window=64``).
    """
    encoding = subject.partition("|")[0]
    seeds = sorted(run.seed for run in comparison.runs if run.subject == subject)
    return [out / "runs" / encoding / f"seed-{seed}" / "model" for seed in seeds]


def _record(comparison: Comparison, row: Row, out: PurePath) -> dict[str, Any]:
    subject, key = row.subject, comparison.headline.key
    lengths = {}
    for length in comparison.test_lengths:
        estimates: dict[str, Any] = {key: _estimate(row.values.get(length))}
        if comparison.metric("recall") is not None:
            estimates["recall"] = _estimate(row.recall.get(length))
        lengths[str(length)] = estimates | {"refusal": row.refusals.get(length)}
    return {
        "name": subject.name,
        "label": subject.label,
        "role": subject.role,
        "rank": row.rank,
        "verdict": row.verdict,
        "gate": row.gate,
        "reason": reason(comparison, row),
        "predicts": row.predicts,
        "finds": row.finds,
        "change": _estimate(row.change),
        "seen": _estimate(row.seen),
        "lengths": lengths,
        "tokens_per_second": row.tokens_per_second,
        "peak_memory_bytes": row.peak_memory_bytes,
        "parameters": row.parameters,
        "models": [str(path) for path in models(comparison, out, subject.name)],
    }


def _estimate(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else value.to_json()
