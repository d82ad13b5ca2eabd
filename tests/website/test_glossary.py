"""Words that are posenc's own, or used in a narrow sense, are in the glossary, and lead to it."""

from __future__ import annotations

import re
import runpy
from types import SimpleNamespace

import pytest

from posenc.attention import BACKENDS
from posenc.lab.reporting.judge import GATES, SEVERITY
from posenc.lab.reporting.opening import TONES
from posenc.registry import ENCODINGS
from posenc.transformers.engines import ENGINES
from tests.website.built import pages
from tests.website.pages import DOCS

GLOSSARY = (DOCS / "start" / "glossary.md").read_text()
BLOCKS = "\n".join(re.findall(r"^```\{glossary\}\n(.*?)^```", GLOSSARY, re.MULTILINE | re.DOTALL))
TERMS = re.findall(r"^(\w.*)$", BLOCKS, re.MULTILINE)

APART = re.compile(
    r"<(a|code|pre|svg|math)\b.*?</\1>|<div class=\"picture\".*?</svg></div></div>", re.DOTALL
)
"""Parts of a page that are not sentences of it."""


glossed = SimpleNamespace(**runpy.run_path(str(DOCS / "_ext" / "glossed.py")))
"""The extension of the site that links words."""


def definition(term: str) -> str:
    """The text below a term."""
    found = re.search(rf"^{term}\n(?:\w.*\n)*((?:  .*\n)+)", BLOCKS, re.MULTILINE)
    assert found is not None, term
    return found[1]


def test_words_that_reports_and_terminals_colour_are_explained() -> None:
    assert set(TONES) | set(GATES) | set(SEVERITY) <= set(TERMS)


def test_names_of_sites_backends_and_engines_are_explained() -> None:
    sites = {site for entry in ENCODINGS.values() for site in entry.claims.sites}
    assert sites <= set(re.findall(r"`(\w+)`", definition("site")))
    assert set(BACKENDS) <= set(re.findall(r"`(\w+)`", definition("backend")))
    for name in ENGINES:
        assert name in definition("engine") or name == "transformers", name


def test_every_term_is_linked_or_has_another_sense() -> None:
    """A new term is put into one of the two lists; a form matches its own term."""
    assert sorted([*glossed.GLOSSED, *glossed.AMBIGUOUS]) == sorted(TERMS)
    for term in glossed.GLOSSED:
        assert glossed.term_of(glossed.WORDS.fullmatch(term)) == term


@pytest.mark.long
def test_pages_lead_to_the_glossary_where_they_use_its_words() -> None:
    used = 0
    missing = set()
    for name, page in pages().items():
        if name.startswith((*glossed.ELSEWHERE, "gallery/", "explorer/sliders")):
            continue
        markup = page.path.read_text()
        article = APART.sub("", markup[markup.index("<article") : markup.index("</article>")])
        text = re.sub(r"<[^>]+>", "", " ".join(re.findall(r"<p\b.*?</p>", article, re.DOTALL)))
        for match in glossed.WORDS.finditer(text):
            used += 1
            term = glossed.term_of(match)
            if f'start/glossary.html#term-{term.replace(" ", "-")}"' not in markup:
                missing.add((name, term))
    assert used > 300
    assert missing == set()
