"""Counts that pages give are those of the code, and figures those of the tables below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posenc.extension import EXTENSIONS
from posenc.lab.evaluation.questions import TASKS as QUESTIONS
from posenc.lab.experiments.tasks import TASKS
from posenc.registry import ENCODINGS
from posenc.transformers.acceleration import FAMILIES as ACCELERATED

ROOT = Path(__file__).parents[2]

NUMERALS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
]
CHINESE = ["零", *"一二三四五六七八九十", *(f"十{digit}" for digit in "一二三四五六七八九"), "二十"]

RULER = set(QUESTIONS) - {"other_words", "json_lookup"}


def entries(table: str) -> list[str]:
    """Names in a table of the explorer's formulas."""
    script = (ROOT / "docs/_extra/explorer/formulas.js").read_text()
    rows = script.partition(f"const {table} = {{")[2].partition("};")[0]
    return re.findall(r"^    (\w+): ", rows, re.M)


def model_kinds() -> list[str]:
    """Kinds of model that choose/ asks about, but one that is trained already."""
    text = (ROOT / "docs/choose/index.md").read_text().partition("\n## ")[0]
    return re.findall(r"^- \*\*(?!A trained model\*)(.+?)\*\*", text, re.M)


COUNTS = {
    ("CHANGELOG.md", "# encodings at four sites"): len(ENCODINGS),
    ("CHANGELOG.md", "# families of transformers with a bias"): len(ACCELERATED),
    ("CHANGELOG.md", "`posenc.extension`: # methods"): len(EXTENSIONS),
    ("CHANGELOG.md", "on text or # tasks"): len(set(TASKS) - {"language"}),
    ("CHANGELOG.md", "RULER's # tasks"): len(RULER),
    ("docs/guides/evaluate.md", "RULER's # tasks"): len(RULER),
    ("docs/explorer/index.md", "frequencies of # methods"): len(entries("METHODS")),
    ("docs/explorer/index.md", "# ways to stretch them"): len(entries("STRETCHES")),
    ("docs/index.md", "a new model: # questions"): len(model_kinds()),
    ("docs/zh/guides/evaluate.md", "RULER 的#个任务"): len(RULER),
    ("docs/zh/index.md", "位置编码：#个问题"): len(model_kinds()),
}
"""Counts in texts, by the page and the words around the count."""


@pytest.mark.parametrize(("page", "words"), COUNTS)
def test_a_count_is_that_of_the_code(page: str, words: str) -> None:
    count, text = COUNTS[page, words], " ".join((ROOT / page).read_text().split())
    found = re.findall(re.escape(words).replace(r"\#", r"(\w+?)"), text)
    forms = {str(count), NUMERALS[count], CHINESE[count]} if count <= 20 else {str(count)}
    assert len(found) == 1, "the words around the count are found once"
    assert found[0].rpartition(" ")[2] in forms, f"{page} says {found[0]}; there are {count}"


RESULTS = ROOT / "docs" / "results"
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
