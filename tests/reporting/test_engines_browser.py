"""The engines' table and the names of kinds of layers in a real browser, on narrow pages too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posenc.evaluation.doctor.diagnosis import diagnose
from posenc.evaluation.doctor.engines import Engines
from posenc.evaluation.doctor.report import write_diagnosis
from tests.evaluation.engines.released import RELEASED
from tests.support.browsing import CHROMIUM, Visit, browser

playwright = pytest.importorskip("playwright.sync_api")

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


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two kinds of layers, in engines that rotate alike."""
    model, folder = (tmp_path_factory.mktemp(name) for name in ("gemma", "browser"))
    fields = RELEASED["Gemma-3-1B"] | {"num_hidden_layers": 12, "sliding_window": 512}
    (model / "config.json").write_text(json.dumps(fields))
    found = diagnose(model, budget=0, run_seconds=0)
    write_diagnosis(found, model, folder, engines=Engines.of(model, "all"))
    return folder / "index.html"


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_no_word_on_engines_is_cut_or_broken(
    browser: playwright.Browser, layered: Path, width: int
) -> None:
    visit = Visit(browser, layered, "html[data-drawn]", viewport={"width": width, "height": 800})
    broken = visit.page.evaluate(BROKEN, "#engines td, .verdicts th, .verdicts td")
    assert broken == []
    labels = visit.page.locator("#chart-turns .mark-text text").all_text_contents()
    assert "full (2 layers)" in labels
    assert not [label for label in labels if "…" in label]
    visit.page.close()
