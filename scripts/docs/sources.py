"""Citations of methods as BibTeX, and reports of other libraries on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from posenc.encoding.entry import Citation

BUGS = Path(__file__).parents[2] / "docs" / "about" / "bugs.md"
ARXIV = re.compile(r"arxiv\.org/abs/(\d{4}\.\d{4,5})")


def bibtex(citation: Citation) -> str:
    """A publication as an entry of BibTeX, with the authors that posenc names."""
    several = citation.authors.endswith(" et al.")
    names = citation.authors.removesuffix(" et al.")
    people = re.split(r",\s+|\s+and\s+", names)
    # The name of an institution is one name.
    authors = " and ".join(f"{{{name}}}" if " " in name else name for name in people)
    authors += " and others" * several
    word = next(w for w in re.findall(r"[A-Za-z]\w+", citation.title) if len(w) > 3)
    key = f"{re.sub(r'[^A-Za-z]', '', people[0])}{citation.year}{word}".lower()
    fields = {"author": authors, "title": f"{{{citation.title}}}", "year": str(citation.year)}
    number = ARXIV.search(citation.url)
    if number is not None:
        fields |= {"eprint": number[1], "archivePrefix": "arXiv"}
    fields["url"] = citation.url
    lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
    return f"@misc{{{key},\n{lines}}}"


@cache
def reports() -> tuple[tuple[str, str, str], ...]:
    """Rows of the page of bugs others had: the report, what went wrong, and tests."""
    cells = (line.strip("| ").split(" | ") for line in BUGS.read_text().splitlines())
    rows = [row for row in cells if row[0] not in ("report", "trap", "") and "---" not in row[0]]
    return tuple(
        (row[0] if len(row) == 3 else "", row[-2], row[-1]) for row in rows if len(row) in (2, 3)
    )


def of_encoding(name: str) -> list[str]:
    """Reports that a test of the encoding keeps out."""
    file = re.compile(rf"encodings/(?:\w+/)?test_{name}\.py")
    return list(_bullets(lambda words, tests: file.search(tests) is not None))


def of_extension(name: str) -> list[str]:
    """Reports that name the method of extension."""
    word = re.compile(rf"\b{name.replace('_', '[ -]')}\b", re.IGNORECASE)
    return list(_bullets(lambda words, tests: word.search(words) is not None))


def _bullets(belongs: Callable[[str, str], bool]) -> Iterator[str]:
    for report, words, tests in reports():
        if belongs(words, tests):
            where = f"{report}: " if report else ""
            yield f"- {where}{words}"
