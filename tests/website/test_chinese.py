"""Chinese pages say what English ones say, by one word for one thing: that of their glossary."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.website.pages import CHINESE, DOCS, TRANSLATED, blocks

INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```", re.MULTILINE)
GLOSSARY = CHINESE / "glossary.md"
ROW = re.compile(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", re.MULTILINE)
ROWS = ROW.findall(GLOSSARY.read_text())[1:]
"""English terms, their Chinese words, and words that are not used for them."""
ELSEWHERE = {
    "base": "a size of models",
    "digit": "pictures of digits",
    "holds": "the verb",
    "in place": "in place of",
    "learned": "the verb",
    "part": "of other things than encodings",
    "relative": "of other things than positions",
    "site": "these pages",
    "stretch": "of tokens",
    "temperature": "of the air",
    "value": "a number",
    "weights": "parameters",
}
"""English words of the glossary that have another sense on these pages."""

NAMES = [path.relative_to(DOCS).as_posix() for path in TRANSLATED]
PAGES = [page for page in sorted(CHINESE.rglob("*.md")) if page != GLOSSARY]


def read(path: Path) -> str:
    """The page, with what it includes in place."""

    def included(match: re.Match[str]) -> str:
        text = (path.parent / match[1]).read_text()
        limits = dict(re.findall(r'^:([a-z-]+): "?(.*?)"?$', match[2], re.MULTILINE))
        assert limits["start-after"] in text
        begun = text.partition(limits["start-after"])[2]
        assert limits["end-before"] in begun
        return begun.partition(limits["end-before"])[0]

    return INCLUDE.sub(included, path.read_text())


def pair(name: str) -> tuple[str, str]:
    """An English page and its Chinese one."""
    return read(DOCS / name), read(CHINESE / name)


def prose(text: str) -> str:
    """A page without blocks of code, comments and fences."""
    text = re.sub(r"^ *```\w+\n.*?^ *```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ *(```|:::).*$", "", text, flags=re.MULTILINE)


def words(text: str) -> str:
    """A page without code and addresses."""
    named = re.sub(r"\{term\}`([^`]*)`", r"\1", prose(text))
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", named)


def code(text: str) -> list[tuple[str, str]]:
    """Blocks of a page, without comments."""
    kinds = ("python", "pycon", "console", "toml")
    return [(kind, re.sub(r" *# .*$", "", x, flags=re.M)) for kind, x in blocks(text, *kinds)]


def numbers(text: str) -> Counter[str]:
    """Numbers outside code."""
    return Counter(re.findall(r"\d[\d,.]*\d|\d", words(text)))


def inline(text: str) -> set[str]:
    """Pieces of code in sentences and tables."""
    plain = re.sub(r"\{term\}`[^`]*`", "", prose(text))
    return {" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", plain)}


def links(path: Path) -> set[str]:
    """Pages that one links to, from docs/ or docs/zh/; some are yet to be made."""
    addresses = re.findall(r"\]\(([^)#\s]+\.md)", prose(read(path)))
    targets = [(path.parent / address).resolve() for address in addresses]
    homes = [CHINESE if CHINESE in target.parents else DOCS for target in targets]
    return {
        target.relative_to(home).as_posix() for target, home in zip(targets, homes, strict=True)
    }


def test_every_page_has_its_translation() -> None:
    assert {name.partition("/")[0] for name in NAMES} == {"start", "choose", "guides"}
    for folder in ("start", "choose", "guides", "theory"):
        english, chinese = (
            {path.name for path in (x / folder).glob("*.md")} for x in (DOCS, CHINESE)
        )
        assert chinese == english


@pytest.mark.parametrize("name", NAMES)
def test_code_is_the_same(name: str) -> None:
    english, chinese = pair(name)
    assert code(chinese) == code(english)
    assert inline(chinese) == inline(english)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_the_same(name: str) -> None:
    english, chinese = pair(name)
    assert numbers(chinese) == numbers(english)


@pytest.mark.parametrize("name", NAMES)
def test_links_are_the_same(name: str) -> None:
    extra = {"glossary.md"} if name == "start/glossary.md" else set()
    assert links(CHINESE / name) == links(DOCS / name) | extra


@pytest.mark.parametrize("name", NAMES)
def test_terms_are_those_of_the_glossary(name: str) -> None:
    english, chinese = (words(text) for text in pair(name))
    missing = {}
    for terms, chosen, _ in ROWS:
        names = re.sub(r" \(.*\)", "", terms).split(", ")
        for term, word in zip(names, chosen.split("、"), strict=True):
            said = term not in ELSEWHERE and re.search(rf"\b{term}s?\b", english)
            if said and word not in chinese:
                missing[term] = word
    assert missing == {}


@pytest.mark.parametrize("name", NAMES)
def test_emphasis_is_read_as_such(name: str) -> None:
    """A ** between a letter and Chinese punctuation is two stars to Markdown."""
    shown = MarkdownIt("commonmark").enable("table").render(prose(read(CHINESE / name)))
    assert re.sub(r"<code.*?</code>", "", shown, flags=re.DOTALL).count("**") == 0


def sentences(page: Path) -> str:
    """The page without code, formulas and addresses."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    return re.sub(r"https?://\S+", "", text)


def comments(page: Path) -> str:
    """Comments of the page's code, which are in English where the code is tested with them."""
    blocks = re.findall(r"^ *```\w+\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"# (.*)", "\n".join(blocks)))


TEXTS = {page.relative_to(CHINESE).as_posix(): sentences(page) for page in PAGES}


def test_the_glossary_has_its_rows() -> None:
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(rows) - 1 > 30


@pytest.mark.parametrize(("term", "chinese", "avoided"), ROWS)
def test_terms_are_used_as_the_glossary_says(term: str, chinese: str, avoided: str) -> None:
    whole = "".join(TEXTS.values())
    for word in chinese.split("、"):
        assert word in whole, f"{word} ({term}) is in no page"
    for word in avoided.split("、"):
        assert [name for name, text in TEXTS.items() if word in text] == [], (word, chinese)
        assert [page.name for page in PAGES if word in comments(page)] == [], (word, chinese)


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("theory/")])
def test_words_in_formulas_are_chinese_and_code_is_the_same(name: str) -> None:
    """Code of the theory has its English comments, too."""
    chinese, english = ((folder / name).read_text() for folder in (CHINESE, DOCS))
    said = re.findall(r"\\text\{([^}]*)\}", chinese)
    assert [word for word in said if not re.search(r"[一-鿿]", word)] == []
    kinds = ("python", "pycon", "console")
    assert blocks(chinese, *kinds) == blocks(english, *kinds)


@pytest.mark.parametrize("name", TEXTS)
def test_pages_are_chinese(name: str) -> None:
    """Half-width punctuation between Chinese characters is a slip, as are English sentences."""
    text = TEXTS[name]
    assert re.findall(r"[一-鿿][,;:?!][一-鿿]", text) == []
    words = re.sub(r"`[^`]*`|\$[^$]*\$", "", text)
    assert re.findall(r"(?:\b[a-z]{2,}\b ){5,}", words) == []
