"""Bring the demo's figures into the README and docs/: ``python scripts/demo.py posenc-demo``.

Run it after ``make demo``: it copies the picture and the numbers; ``make pages`` writes the tables.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import summarise
from posenc.lab.reporting.numbers import Estimate

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(folder: Path) -> None:
    """Copy the picture of a finished demo, and write its verdicts and values in a table."""
    shutil.copy(folder / "report" / "headline.png", RESULTS / "demo-headline.png")
    plain = json.loads((folder / "report" / "comparison.json").read_text())
    comparison = Comparison.from_json(plain)
    rows = [
        {"subject": row.subject.name, "verdict": row.verdict}
        | columns("loss", comparison.test_lengths, row.values)
        | columns("recall", comparison.test_lengths, row.recall)
        for row in summarise(comparison).rows
    ]
    with (RESULTS / "demo-summary.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def columns(
    metric: str, lengths: tuple[int, ...], values: Mapping[int, Estimate]
) -> dict[str, object]:
    """Means and ends of intervals by length; empty where there are none."""
    found: dict[str, object] = {}
    for length in lengths:
        plain = values[length].to_json() if length in values else {}
        for end in ("mean", "low", "high"):
            name = f"{metric}@{length}" + ("" if end == "mean" else f"_{end}")
            found[name] = plain.get(end)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
