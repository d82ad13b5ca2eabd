"""Docstrings as HTML: code, and formulas such as ``s_ij += -m_h · |Δ|`` as MathML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from html import escape as escape_html

from markupsafe import Markup


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


TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)"
    r"|(?P<sum>[ΣΠ])"
    r"|(?P<power>[²ᵀ])"
    r"|(?P<script>[_^])"
    r"|(?P<word>[a-z]{2,}_[a-z]{3,}|[A-Za-z]{2,}|[^\W\d_]\u0304?'?)"
    r"|(?P<root>√)"
    r"|(?P<bars>\|[^|]*\||‖[^‖]*‖)"
    r"|(?P<open>[(\[{⌊⌈⟨])"
    r"|(?P<close>[)\]}⌋⌉⟩])"
    r"|(?P<operator>\+=|<=|>=|\.\.|.)"
)
SCRIPT = re.compile(r"-?\d+(?:/\d+)?|-?[A-Za-z0-9α-ω]+")
"""An index or power without brackets."""

SIGNS = {
    "-": "−",
    "<=": "≤",
    ">=": "≥",
    "..": "…",
    "Σ": "∑",
    "Π": "∏",
    "²": "2",
    "ᵀ": "⊤",
    "'": "′",
}
BREAKING = frozenset(["+", "−", "=", "+=", "<", ">", "≤", "≥", ",", ";", ":", "…", "~", "←", "→"])
"""Operators that end a product, and with it the numerator or denominator of a fraction."""

FUNCTIONS = ("ln", "log", "cos", "sin")
"""Names that a space may part from their argument."""

PYTHON = re.compile(
    r'"|\.\.\.|\([a-z]+=|[a-z]\.[a-zA-Z]|^\[[^=]*\]$|^[A-Za-z]{2}\w*(?:=.*)?$|^[a-z]{3,}_[a-z]{3,}'
)
"""Code that is no formula: names, strings, shapes, options, attributes."""

TAGS = {(1, 0): "msub", (0, 1): "msup", (1, 1): "msubsup"}
LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}


@dataclass
class _Term:
    """A piece of a formula.

    Args:
        html: its MathML.
        inner: that without its brackets, if these are round.
        operator: its sign, if it is an operator.
        script: index and power that belong to it by its name, such as a prime.
    """

    html: str
    inner: str | None = None
    operator: str = ""
    script: tuple[str, str] = ("", "")


def is_mathematics(code: str) -> bool:
    """True if code in a docstring is a formula or a symbol rather than Python."""
    return not PYTHON.search(code)


def mathml(code: str, *, display: bool = False) -> str:
    """A formula in the notation of docstrings as a ``<math>`` element.

    Indices follow ``_`` and powers ``^``, in brackets if they are more than a name or a number.

    Args:
        code: the formula.
        display: on a line of its own, where a slash between spaces becomes a fraction's line.
    """
    block = ' display="block"' if display else ""
    return f"<math{block}>{_Parser(code, fractions=display).row()}</math>"


class _Parser:
    """Reader of one formula, token by token."""

    def __init__(self, code: str, *, fractions: bool) -> None:
        self.tokens = [(match.lastgroup or "", match[0]) for match in TOKEN.finditer(code)]
        self.at, self.fractions = 0, fractions

    def row(self) -> str:
        """Terms up to a closing bracket or the end."""
        terms: list[_Term] = []
        while self._kind() not in ("", "close"):
            if self._kind() == "space":
                self.at += 1
                if terms and not terms[-1].operator and self._kind() not in ("operator", "close"):
                    terms.append(_Term('<mspace width="0.2em"/>'))
            elif self.fractions and self.tokens[self.at - 1 : self.at + 2] == SLASH:
                self.at += 2
                above = _product(terms)
                terms.append(_Term(f"<mfrac>{above}{self._denominator()}</mfrac>"))
            else:
                terms.append(self._scripted())
        return "".join(term.html for term in terms)

    def _kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        """The next token's text, or none at the end."""
        self.at += 1
        return self.tokens[self.at - 1][1] if self.at <= len(self.tokens) else ""

    def _denominator(self) -> str:
        """The factors up to a space, but for that after a function's name."""
        terms = [self._scripted()]
        while self._kind() in ("word", "number", "open", "bars", "space"):
            if self._kind() == "space":
                if self.tokens[self.at - 1][1] not in FUNCTIONS:
                    break
                terms.append(_Term('<mspace width="0.2em"/>'))
                self.at += 1
            terms.append(self._scripted())
        return _joined(terms)

    def _scripted(self) -> _Term:
        """One symbol, number or bracket with its index and power."""
        large = self._kind() == "sum"
        base = self._atom()
        below, above = base.script
        while self._kind() in ("script", "power"):
            sign = self._take()
            if sign in SIGNS:
                above += f"<mo>{SIGNS[sign]}</mo>"
            elif sign == "_":
                below += self._script()
            else:
                above += self._script()
        if not below and not above:
            return base
        tag = TAGS[bool(below), bool(above)]
        tag = LIMITS[tag] if large else tag
        scripts = "".join(f"<mrow>{script}</mrow>" for script in (below, above) if script)
        return _Term(f"<{tag}>{base.html}{scripts}</{tag}>")

    def _script(self) -> str:
        """An index or power, after its sign."""
        if self._kind() == "open" and self.tokens[self.at][1] in "({":
            self.at += 1
            content = self.row()
            self.at += 1
            return content
        match = SCRIPT.match("".join(text for _, text in self.tokens[self.at :]))
        taken = ""
        while match is not None and len(taken) < len(match[0]):
            taken += self._take()
        return _letters(taken)

    def _atom(self) -> _Term:
        kind = self._kind()
        text = self._take()
        sign = escape(SIGNS.get(text, text))
        match kind:
            case "number":
                return _Term(f"<mn>{text}</mn>")
            case "word":
                return self._name(text)
            case "sum":
                return _Term(f'<mo movablelimits="true">{sign}</mo>')
            case "bars":
                inner = _Parser(text[1:-1], fractions=False).row()
                return _Term(f"<mrow>{_bracket(text[0])}{inner}{_bracket(text[0])}</mrow>")
            case "root" if self._take():
                inner = self.row()
                self.at += 1
                return _Term(f"<msqrt>{inner}</msqrt>")
            case "open":
                inner = self.row()
                ends = _bracket(text), _bracket(self._take())
                return _Term(
                    f"<mrow>{ends[0]}{inner}{ends[1]}</mrow>", inner if text == "(" else None
                )
        return _Term(f"<mo>{sign}</mo>", operator=sign)

    def _name(self, word: str) -> _Term:
        """A symbol, slanted, or a word, upright."""
        prime = "<mo>′</mo>" if word.endswith("'") else ""
        word = word.removesuffix("'")
        html = f"<mi>{word}</mi>"
        if word.endswith("\u0304"):
            html = f'<mover accent="true"><mi>{word[0]}</mi><mo>¯</mo></mover>'
        number = ""
        if word in ("log", "r") and self._kind() == "number":  # log2, r1
            number = f"<mn>{self._take()}</mn>"
        return _Term(html, script=(number, prime))


SLASH = [("space", " "), ("operator", "/"), ("space", " ")]


def _product(terms: list[_Term]) -> str:
    """Take the last product off the terms."""
    start = len(terms)
    while start and terms[start - 1].operator not in BREAKING:
        start -= 1
    taken = terms[start:]
    del terms[start:]
    return _joined(taken)


def _joined(terms: list[_Term]) -> str:
    """Numerator or denominator, which needs no brackets around the whole."""
    if len(terms) == 1 and terms[0].inner is not None:
        return f"<mrow>{terms[0].inner}</mrow>"
    return f"<mrow>{''.join(term.html for term in terms)}</mrow>"


def _bracket(sign: str) -> str:
    return f'<mo stretchy="false">{sign}</mo>' if sign else ""


def _letters(index: str) -> str:
    """An index such as ``ij`` letter by letter; a word is one name."""
    if re.fullmatch(r"[A-Za-z]{4,}", index):
        return f"<mi>{index}</mi>"
    pieces = re.findall(r"\d+|.", index)
    return "".join(
        f"<mn>{piece}</mn>"
        if piece.isdigit()
        else f"<mo>{SIGNS.get(piece, piece)}</mo>"
        if piece in "-/"
        else f"<mi>{piece}</mi>"
        for piece in pieces
    )
