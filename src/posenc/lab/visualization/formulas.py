"""Docstrings as HTML: code, formulas, and which paragraphs are formulas."""

from __future__ import annotations

import re
from html import escape as escape_html

from markupsafe import Markup

from posenc.lab.visualization.mathml import is_mathematics, mathml


def prose(text: str) -> Markup:
    """A docstring's text: formulas in ``code`` as MathML, other code as such, indices outside."""
    pieces = text.split("``")
    done = [_code(piece) if number % 2 else _formula(piece) for number, piece in enumerate(pieces)]
    return Markup("").join(done)


def _code(piece: str) -> Markup:
    if is_mathematics(piece):
        return Markup(mathml(piece))
    return Markup("<code>{}</code>").format(piece)


FEW = 30
"""Characters."""


def is_formula(paragraph: str) -> bool:
    """True if a paragraph begins with code that computes something rather than names it.

    A few words may stand before it.
    """
    opening, _, rest = paragraph.partition("``")
    return len(opening) < FEW and any(sign in rest.partition("``")[0] for sign in "=+·Σ⊗⊙")


INDEX = re.compile(
    r"((?<![A-Za-z_+])[A-Za-zα-ωΑ-Ω]\d?'?|</sup>)"
    r"_(\{[^}]*\}|\([^)]*\)|axis|[A-Za-z0-9α-ω]{1,3})(?![A-Za-z0-9_])"
)
POWER = re.compile(r"\^(\{[^}]*\}|\((?:[^()]|\([^()]*\))*\)|-?\d+/\d+|-?[A-Za-z0-9α-ω]+)")


def _formula(code: str) -> Markup:
    """``s_ij`` with ij below, ``a^K`` with K above; longer names stay as they are."""
    text = escape_html(code, quote=False)
    text = POWER.sub(lambda m: f"<sup>{_bare(m[1])}</sup>", text)
    text = INDEX.sub(lambda m: f"{m[1]}<sub>{_bare(m[2])}</sub>", text)
    return Markup(text)


def _bare(raised: str) -> str:
    """Text of an index or power, without its brackets."""
    return raised[1:-1] if raised[0] in "{(" else raised
