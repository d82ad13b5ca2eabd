"""The engines' table and the names of kinds of layers in a real browser, on narrow pages too."""

from __future__ import annotations

import pytest

from tests.lab.reporting.opened import views
from tests.support.browsing import CHROMIUM, Visit, browser

__all__ = ["browser"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]

BROKEN = """(selector) => [...document.querySelectorAll(selector)].flatMap((cell) => {
    const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
    for (let node; (node = walk.nextNode()); )
      for (const word of node.data.matchAll(/[\\w.]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
        if (range.getClientRects().length > 1) found.push(word[0]); }
    return found; })"""
"""Words that are broken over two lines."""


@views("layered", widths=(1280, 768, 390))
def test_no_word_on_engines_is_cut_or_broken(view: Visit) -> None:
    broken = view.page.evaluate(BROKEN, "#engines td, .verdicts th, .verdicts td")
    assert broken == []
    labels = view.page.locator("#chart-turns .mark-text text").all_text_contents()
    assert "full (2 layers)" in labels
    assert not [label for label in labels if "…" in label]
