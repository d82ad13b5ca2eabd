"""Ends of lines in tables: not within pairs and intervals, and in long names between their words.

``0.53 / 0.48`` stays on a line; ``attention/test_sdpa.py::test_no_bias`` may end one after a ``/``,
``::`` or ``_``, where browsers see no space.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

NUMBER = r"-?[\d.,]+ ?%?"
TOGETHER = re.compile(rf"{NUMBER} / {NUMBER}|\({NUMBER} to {NUMBER}\)")

CELL = re.compile(r"<td.*?</td>", re.DOTALL)
NAME = re.compile(r'(<span class="pre">)([^<]{12,})(</span>)')
BETWEEN = re.compile(r"(?<=[_/.@=])(?=\w)|(?<=::)")


def keep_together(app: Sphinx, tree: nodes.document) -> None:
    """Replace the spaces inside them by ones that do not break."""
    for cell in tree.findall(nodes.entry):
        for text in list(cell.findall(nodes.Text)):
            words = TOGETHER.sub(lambda match: match[0].replace(" ", "\u00a0"), text)
            if words != text:
                text.parent.replace(text, nodes.Text(words))


def break_names(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
) -> None:
    """Offer places for the end of a line in long names of code in cells."""

    def offered(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return begin + BETWEEN.sub(f"{end}<wbr>{begin}", name) + end

    context["body"] = CELL.sub(lambda cell: NAME.sub(offered, cell[0]), context.get("body", ""))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", break_names)
    app.connect("doctree-read", keep_together)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
