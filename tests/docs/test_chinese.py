"""Chinese pages use one word for one thing: that of their glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHINESE = Path(__file__).parents[2] / "docs" / "zh"
GLOSSARY = CHINESE / "glossary.md"
PAGES = [page for page in sorted(CHINESE.rglob("*.md")) if page != GLOSSARY]
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in GLOSSARY.read_text().splitlines()
    if row.startswith("| ") and not row.startswith("| English")
]


def prose(page: Path) -> str:
    """The page without code, formulas and addresses."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    return re.sub(r"https?://\S+", "", text)


def comments(page: Path) -> str:
    """Comments of the page's code, which are in English where the code is tested with them."""
    blocks = re.findall(r"^ *```\w+\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"# (.*)", "\n".join(blocks)))


TEXTS = {page.relative_to(CHINESE).as_posix(): prose(page) for page in PAGES}


def test_the_glossary_has_its_rows() -> None:
    assert len(ROWS) > 30
    assert all(len(row) == 3 and all(row) for row in ROWS)


@pytest.mark.parametrize(("term", "chinese", "avoided"), ROWS)
def test_terms_are_used_as_the_glossary_says(term: str, chinese: str, avoided: str) -> None:
    whole = "".join(TEXTS.values())
    for word in chinese.split("、"):
        assert word in whole, f"{word} ({term}) is in no page"
    for word in avoided.split("、"):
        assert [name for name, text in TEXTS.items() if word in text] == [], (word, chinese)
        assert [page.name for page in PAGES if word in comments(page)] == [], (word, chinese)


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("theory/")])
def test_words_in_formulas_are_chinese(name: str) -> None:
    said = re.findall(r"\\text\{([^}]*)\}", (CHINESE / name).read_text())
    assert [word for word in said if not re.search(r"[一-鿿]", word)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_pages_are_chinese(name: str) -> None:
    """Half-width punctuation between Chinese characters is a slip, as are English sentences."""
    text = TEXTS[name]
    assert re.findall(r"[一-鿿][,;:?!][一-鿿]", text) == []
    words = re.sub(r"`[^`]*`|\$[^$]*\$", "", text)
    assert re.findall(r"(?:\b[a-z]{2,}\b ){5,}", words) == []


def test_every_page_of_the_theory_is_there() -> None:
    english = {page.name for page in (CHINESE.parent / "theory").glob("*.md")}
    assert {page.name for page in (CHINESE / "theory").glob("*.md")} == english


CODE = re.compile(r"^```(?:python|pycon|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, page in zip(TEXTS, PAGES, strict=True)
        if name.startswith("theory/") and CODE.search(page.read_text())
    ],
)
def test_code_is_that_of_the_english_page(name: str) -> None:
    """Its numbers are checked there; other folders have comments in Chinese (tests/website)."""
    chinese, english = (
        CODE.findall((folder / name).read_text()) for folder in (CHINESE, CHINESE.parent)
    )
    assert chinese == english
