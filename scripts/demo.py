"""Bring the demo's figures into the README and docs/: ``python scripts/demo.py posenc-demo``.

Run it after ``make demo``: it copies the picture and the numbers, and writes the README's table.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- demo -->", "<!-- end -->"


def table(rows: list[Mapping[str, str]]) -> str:
    """The README's table, from the rows of ``summary.csv``."""
    lengths = [key.partition("@")[2] for key in rows[0] if key.startswith("loss@")]
    lengths = [length for length in lengths if length.isdigit()]
    last = lengths[-1]
    head = f"trained at {lengths[0]} bytes; bits per byte at | {' | '.join(lengths)}"
    lines = [f"| {head} | recall at {last} | verdict |", "|---" * (len(lengths) + 3) + "|"]
    for row in rows:
        losses = [_cell(row, f"loss@{length}", ".2f") or "cannot" for length in lengths]
        found = _cell(row, f"recall@{last}", ".0%") or "–"
        cells = [_label(row["subject"]), *losses, found, row["verdict"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(readme: str, made: str) -> str:
    """The README with another table between the marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def read(path: Path) -> list[Mapping[str, str]]:
    """Rows of a ``summary.csv``."""
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def _label(subject: str) -> str:
    name, bar, window = subject.partition("|window=")
    return f"{name} (window {window})" if bar else name


def _cell(row: Mapping[str, str], key: str, form: str) -> str:
    """A mean with its interval, as reports show it; "" where there is none."""
    if not row.get(key):
        return ""
    shown = f"{float(row[key]):{form}}"
    if not row[f"{key}_low"]:
        return shown
    low, high = (f"{float(row[f'{key}_{end}']):{form}}".rstrip("%") for end in ("low", "high"))
    return f"{shown} ({low} to {high})"


def main(folder: Path) -> None:
    """Copy the figures of a finished demo."""
    shutil.copy(folder / "report/headline.png", ROOT / "docs/results/demo-headline.png")
    shutil.copy(folder / "report/summary.csv", ROOT / "docs/results/demo-summary.csv")
    readme = ROOT / "README.md"
    rows = read(ROOT / "docs/results/demo-summary.csv")
    readme.write_text(replaced(readme.read_text(), table(rows)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
