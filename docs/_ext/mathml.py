"""Formulas as MathML, which browsers draw without a script or a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

FENCE = 'form="prefix" stretchy="false" lspace="0" rspace="0"'
THIN = '<mspace width="0.1667em"></mspace>'


def mathml(text: str, *, as_block: bool = False) -> str:
    """A formula of LaTeX, with the spaces that browsers leave to the writer.

    Bars are drawn as relations, apart from what they enclose, unless they are said to be fences;
    and the name of a function stands right before its argument.
    """
    formula = tex2mathml(text, as_block=as_block)
    formula = re.sub(r'<mo class="mathopen">([|‖])</mo>', rf"<mo {FENCE}>\1</mo>", formula)
    formula = re.sub(
        r"<mo>([|‖])</mo>", rf"<mo {FENCE.replace('prefix', 'postfix')}>\1</mo>", formula
    )
    return re.sub(r"(<mo>&ApplyFunction;</mo>)(?=\s*<m[inr])", rf"\1{THIN}", formula)


def inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """Write a displayed formula, in a box of its own that scrolls."""
    formula = mathml(node.astext(), as_block=True)
    writer.body.append(f'<div class="math" tabindex="0" role="group">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
