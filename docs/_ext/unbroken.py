"""Pairs and intervals in tables are not broken at the end of a line: ``0.53 / 0.48``."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

NUMBER = r"-?[\d.,]+ ?%?"
TOGETHER = re.compile(rf"{NUMBER} / {NUMBER}|\({NUMBER} to {NUMBER}\)")


def keep_together(app: Sphinx, tree: nodes.document) -> None:
    """Replace the spaces inside them by ones that do not break."""
    for cell in tree.findall(nodes.entry):
        for text in list(cell.findall(nodes.Text)):
            words = TOGETHER.sub(lambda match: match[0].replace(" ", "\u00a0"), text)
            if words != text:
                text.parent.replace(text, nodes.Text(words))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", keep_together)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
