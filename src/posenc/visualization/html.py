"""Templates of HTML pages, and formulas in them."""

from __future__ import annotations

import json
import re
from html import escape as escape_html
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from posenc.visualization.colours import DARK, LIGHT


def environment(*packages: str) -> Environment:
    """Templates of these packages, the first that has a name before the others, and the shared."""
    loaders = [PackageLoader(package) for package in (*packages, "posenc.visualization")]
    made = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"json": _inline_json, "prose": prose}
    made.tests["formula"] = is_formula
    return made


def source(templates: Environment, name: str) -> Markup:
    """A template's own text, put into a page as it is."""
    assert templates.loader is not None  # given above
    return Markup(templates.loader.get_source(templates, name)[0])


def styles(templates: Environment, *names: str) -> Markup:
    """Style sheets one after the other, with the colours of light and dark paper before them."""
    light, dark = (
        ":root { " + " ".join(f"{name}: {colour};" for name, colour in colours.items()) + " }"
        for colours in (LIGHT, DARK)
    )
    colours = f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"
    return Markup(colours) + Markup("").join(source(templates, name) for name in names)


def recoloured(selector: str) -> Markup:
    """Styles by which pictures drawn for light paper follow the paper."""
    rules = [
        f'{selector} [{part}="{colour}"] {{ {part}: var({name}); }}'
        for name, colour in LIGHT.items()
        for part in ("stroke", "fill")
        if name != "--paper"
    ]
    return Markup("\n".join(rules) + "\n")


def _inline_json(value: Any) -> Markup:
    """JSON that no HTML parser mistakes for markup."""
    return Markup(json.dumps(value).replace("<", "\\u003c"))


def prose(text: str) -> Markup:
    """A docstring's text, its ``code`` set as code, with indices and powers where they belong."""
    pieces = text.split("``")
    done = [
        Markup("<code>{}</code>").format(_formula(piece)) if number % 2 else _formula(piece)
        for number, piece in enumerate(pieces)
    ]
    return Markup("").join(done)


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
