"""Types of parameters as readers know them: of ``Annotated``, the type without its checks."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ANNOTATED = re.compile(
    r"(?:~?(?:\w+\.)+)?Annotated\[((?:(?!Annotated\[).)+?), ~?[\w.]+\((?:(?!Annotated\[).)*?\)\]"
)
"""The innermost ``Annotated[int, Interval(low=1, …)]``, which autodoc writes out."""


def plain(hint: str) -> str:
    """A type hint without what annotates its types."""
    count = 1
    while count:
        hint, count = ANNOTATED.subn(r"\1", hint)
    return hint


def shorten(app: Sphinx, domain: str, kind: str, content: object) -> None:
    """Shorten the hints that autodoc has recorded, before it writes them into the page."""
    for hints in app.env.current_document.autodoc_annotations.values():
        hints.update({name: plain(hint) for name, hint in hints.items()})


def shorten_fields(app: Sphinx, tree: nodes.document) -> None:
    """Shorten the hints beside the names of fields."""
    for hint in tree.findall(addnodes.desc_annotation):
        text = hint.astext()
        if "Annotated[" in text:
            hint.children = [nodes.Text(re.sub(r"~(?:\w+\.)+", "", plain(text)))]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("object-description-transform", shorten, priority=400)
    app.connect("doctree-read", shorten_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
