"""Results: figures that sentences quote are those of the tables below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TABLES = re.compile(r"<!-- [\w-]+ -->(.*?)<!-- end -->", re.DOTALL)
INTERVAL = re.compile(r"([\d.]+)\s?%? \(([\d.]+) to ([\d.]+)\)")
PAGES = [
    page
    for page in sorted(RESULTS.glob("*.md"))
    if TABLES.search(page.read_text()) and page.stem != "reverse"  # which quotes another run
]


def is_rounded(quoted: tuple[str, ...], cell: tuple[str, ...]) -> bool:
    """True if each number is that of the cell at its own number of decimal places."""
    return all(
        abs(float(a) - float(b)) <= 0.5 * 10 ** -len(a.partition(".")[2]) + 1e-9
        for a, b in zip(quoted, cell, strict=True)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_intervals_are_in_a_table(page: Path) -> None:
    text = page.read_text()
    cells = INTERVAL.findall("".join(TABLES.findall(text)))
    quoted = INTERVAL.findall(TABLES.sub("", text))
    assert [x for x in quoted if not any(is_rounded(x, cell) for cell in cells)] == []


def test_rounding_is_told_from_another_number() -> None:
    assert is_rounded(("8", "4", "11"), ("7.6", "4.4", "10.8"))
    assert not is_rounded(("8", "5", "11"), ("7.6", "4.4", "10.8"))
