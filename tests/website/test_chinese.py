"""Chinese pages say what their English ones say: the same code, numbers, names and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.website.pages import CHINESE, DOCS, TRANSLATED, blocks

INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```", re.MULTILINE)
GLOSSARY = DOCS / "zh" / "glossary.md"
ROWS = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| [^|]+ \|$", GLOSSARY.read_text(), re.MULTILINE)[1:]
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
    found = {folder for name in NAMES if (folder := name.partition("/")[0])}
    assert found == {"start", "choose", "guides"}
    chinese = {
        path.relative_to(CHINESE).as_posix()
        for folder in found
        for path in (CHINESE / folder).glob("*")
    }
    assert chinese == set(NAMES)


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
    for terms, chosen in ROWS:
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
