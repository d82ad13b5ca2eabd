"""Markdown of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from posenc.lab.visualization.formulas import is_mathematics, mathml
from posenc.lab.visualization.formulas import prose as words

MADE = "<!-- made by `make docs` from the registry: edit the docstring and the entry instead -->"

SPAN = re.compile(r"``(.+?)``", re.DOTALL)
FEW = 30
"""Characters between formulas that are displayed together."""

SPECIAL = re.compile(r"[^\w\s.,;:()\[\]<>=/\"'-]")
"""Characters of MathML that Markdown might read as its own."""


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in lines
    )


def listed(names: Iterable[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def prose(text: str) -> str:
    """A docstring's text, its formulas as MathML and its names as code."""
    pieces = SPAN.split(text)
    return "".join(
        _escaped(piece) if not at % 2 else _formula(piece) for at, piece in enumerate(pieces)
    )


def paragraph(text: str) -> list[str]:
    """Blocks of a paragraph of a docstring: the formulas it begins with are displayed."""
    if "\n" in text:
        return [f"```text\n{text}\n```"]
    pieces = SPAN.split(text)
    displayed = []
    while len(pieces) > 2 and len(pieces[0]) < FEW * bool(displayed) + 1 and "=" in pieces[1]:
        displayed.append(pieces[1])
        del pieces[:2]
    if not displayed:
        return [prose(text)]
    formulas = "".join(_entities(mathml(code, display=True)) for code in displayed)
    rest = prose("".join(f"``{p}``" if at % 2 else p for at, p in enumerate(pieces)))
    frame = '<div class="formula" tabindex="0" role="group" aria-label="Formula">'
    return [f"{frame}{formulas}</div>", rest.lstrip(" ,.;")]


def _formula(code: str) -> str:
    flowed = " ".join(code.split())
    return _entities(mathml(flowed)) if is_mathematics(flowed) else f"`{flowed}`"


def _entities(html: str) -> str:
    return SPECIAL.sub(lambda match: f"&#{ord(match[0])};", html).replace("_", "&#95;")


def _escaped(text: str) -> str:
    """Text with its indices and powers, and without what Markdown reads as its own."""
    return re.sub(r"[\\*_\[\]`~^|]", lambda sign: f"&#{ord(sign[0])};", words(text))
