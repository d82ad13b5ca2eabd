"""Bring the demo's figures into the README and docs/: ``python scripts/demo.py posenc-demo``.

Run it after ``make demo``: it copies the picture and the numbers; ``make pages`` writes the tables.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(folder: Path) -> None:
    """Copy the figures of a finished demo."""
    for name in ("headline.png", "summary.csv"):
        shutil.copy(folder / "report" / name, RESULTS / f"demo-{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
