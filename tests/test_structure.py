"""Sizes of files and packages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import posenc

PACKAGE = Path(posenc.__file__).parent
LONGEST = 500
LARGEST = 0.25

LINES = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}


def test_no_file_is_too_long_to_keep_in_mind() -> None:
    """A method is one file, whatever its length."""
    sites = [PACKAGE / "encodings" / site for site in ("embedding", "query_key", "score")]
    lines = {file: n for file, n in LINES.items() if file.parent not in sites}
    assert {str(file.relative_to(PACKAGE)): n for file, n in lines.items() if n > LONGEST} == {}


def test_no_package_holds_more_than_a_quarter_of_the_lines() -> None:
    packages: Counter[str] = Counter()
    for file, lines in LINES.items():
        packages[file.relative_to(PACKAGE).parts[0]] += lines
    assert {name: n for name, n in packages.items() if n > LARGEST * sum(LINES.values())} == {}
