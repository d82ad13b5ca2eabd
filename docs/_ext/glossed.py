"""Words of the glossary link to it where a page first uses them."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

GLOSSED = {
    "adjacent pairs": "adjacent pairs",
    "backend": "backends?",
    "bits per byte": "bits (?:per|a) byte",
    "bucket": "buckets?",
    "control": "controls?",
    "effective length": "effective lengths?",
    "engine": "engines?",
    "half pairs": "half pairs",
    "latent attention": "latent attention",
    "LSE": "LSE",
    "moving positions": "moving positions",
    "needle": "needles?",
    "NoPE": "NoPE",
    "offset": "offsets?",
    "plain SDPA": "plain SDPA",
    "recall": "recall",
    "sink": "sinks?",
    "soft cap": "soft caps?",
    "trained length": "(?:trained|training) lengths?",
    "untestable": "untestable",
    "verdict": "verdicts?",
}
"""Terms by the forms in which pages use them, in no other sense."""

AMBIGUOUS = {
    **dict.fromkeys(("encoding", "extension", "stretch", "extrapolation"), "what pages are about"),
    **dict.fromkeys(("holds", "degrades", "breaks", "learned", "refuses", "differs"), "verbs"),
    **dict.fromkeys(("fast", "slow", "slower", "same", "unknown", "unsure"), "plain words"),
    **dict.fromkeys(("tied", "unlearned", "overfitted", "unfinished"), "plain words"),
    **dict.fromkeys(("base", "theta", "gain", "factor", "temperature"), "symbols in formulas"),
    **dict.fromkeys(("Layout", "Grid"), "classes, mostly code"),
    "definition": "of a word too",
    "gate": "of forgetting too",
    "interval": "of keys too",
    "law": "of physics too",
    "relative": "compared with something",
    "site": "these pages too",
}
"""Terms that pages use in another sense as well, and link by hand."""

ELSEWHERE = ("start/glossary", "about/changes", "reference/api/", "zh/")
"""Pages, by the beginnings of their names, that are not linked."""

APART = (nodes.literal, nodes.math, nodes.reference, nodes.term, pending_xref)
WORDS = re.compile(r"\b(?:" + "|".join(f"({form})" for form in GLOSSED.values()) + r")\b")


def term_of(match: re.Match[str]) -> str:
    """The term of which a match is a form."""
    return list(GLOSSED)[(match.lastindex or 1) - 1]


def linked(match: re.Match[str], page: str) -> pending_xref:
    """A word as a link to its term."""
    term = term_of(match)
    kind = {"refdomain": "std", "reftype": "term", "refexplicit": True}
    link = pending_xref("", reftarget=term, refdoc=page, **kind)
    link += nodes.inline("", match[0], classes=["glossed"])
    return link


def gloss(app: Sphinx, tree: nodes.document) -> None:
    """Link the first use of each word in the sentences of a page."""
    page = app.env.docname
    if page.startswith(ELSEWHERE):
        return
    done = {x["reftarget"] for x in tree.findall(pending_xref) if x.get("reftype") == "term"}
    for block in list(tree.findall(nodes.paragraph)):
        for text in list(block.findall(nodes.Text)):
            above = text.parent
            while above is not block and not isinstance(above, APART):
                above = above.parent
            pieces: list[nodes.Node] = []
            begin = 0
            for match in () if above is not block else WORDS.finditer(text):
                term = term_of(match)
                if term in done:
                    continue
                done.add(term)
                pieces += [nodes.Text(text[begin : match.start()]), linked(match, page)]
                begin = match.end()
            if pieces:
                text.parent.replace(text, [*pieces, nodes.Text(text[begin:])])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", gloss)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
