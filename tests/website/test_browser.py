"""Pages of each kind in Chromium: accessible, in both schemes, and no wider than a phone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.browsing import CHROMIUM, Visit, browser, playwright
from tests.website.built import SITE, pages, site

axe = pytest.importorskip("axe_playwright_python")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]

__all__ = ["browser"]  # a fixture

FOLDERS = ("start", "choose", "guides", "results", "about")
"""Whose pages are looked at one by one; of other folders two."""

CHECK = """async (rules) => {
  const only = rules ? { runOnly: { type: "rule", values: rules } } : {};
  const found = await axe.run({ resultTypes: ["violations"], ...only });
  return found.violations.filter((v) => ["serious", "critical"].includes(v.impact))
    .flatMap((v) => v.nodes.map((n) => `${v.id}: ${n.html.slice(0, 99)} ${n.failureSummary}`)); }"""

DARK = """() => { const [r, g, b] = getComputedStyle(document.body).backgroundColor
  .match(/[\\d.]+/g).map(Number); return r + g + b < 300; }"""
"""Whether the page has a dark ground."""


SCROLLBAR = 15
"""Pixels that a scroll bar takes from a window on most systems."""

SCROLLED = """() => [...document.querySelectorAll(
  ":is(.highlight-python, .highlight-pycon, .highlight-Python) pre")]
  .filter((e) => e.scrollWidth > e.clientWidth)
  .map((e) => e.innerText.split("\\n").sort((a, b) => b.length - a.length)[0])"""
"""The longest line of each block of Python that is wider than its column."""

HEADER = "document.querySelector('.bd-header').offsetHeight"

TOPS = """(part) => [...document.querySelectorAll(`.picture .panel > ${part}`)]
  .map((e) => e.getBoundingClientRect().top)"""
"""Upper edges of the titles or charts of panels, two of which are in a row."""


@cache
def kinds(*, all_of: tuple[str, ...] = ()) -> list[str]:
    """The first page of every folder and the next, or all of those of a folder."""
    folders: dict[str, list[str]] = {}
    for name in sorted(pages(), key=lambda name: (not name.endswith("index.html"), name)):
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    chosen = ((names if folder in all_of else names[:2]) for folder, names in folders.items())
    return [name for names in chosen for name in names]


class Seen(NamedTuple):
    """A page as it was seen: what went wrong or out, and violations in both schemes."""

    troubles: list[str]
    outside: list[str]
    light: list[str]
    dark: list[str]


@pytest.fixture(scope="module")
def seen(browser: playwright.Browser) -> dict[str, Seen]:
    script = (Path(axe.__file__).parent / "axe.min.js").read_text()
    found = {}
    for name in kinds():
        visit = Visit(browser, site() / name, color_scheme="light", reduced_motion="reduce")
        outside = [url for url in visit.requests if not url.startswith(("file:", "data:"))]
        troubles = list(visit.troubles)  # before axe reads the styles, which a file may not
        visit.page.evaluate(script)
        light = visit.page.evaluate(CHECK, None)
        visit.page.add_style_tag(content="* { transition: none !important; }")
        visit.page.emulate_media(color_scheme="dark")
        visit.page.wait_for_function(DARK)
        dark = visit.page.evaluate(CHECK, ["color-contrast"])
        found[name] = Seen(troubles, outside, light, dark)
        visit.page.close()
    return found


@pytest.mark.parametrize("field", Seen._fields)
def test_nothing_is_wrong_with_a_page(seen: dict[str, Seen], field: str) -> None:
    assert {name: getattr(page, field) for name, page in seen.items() if getattr(page, field)} == {}


CUT_FORMULAS = """
[...document.querySelectorAll("math")].filter(math => {
  let box = math.parentElement
  while (box && getComputedStyle(box).overflowX === "visible") box = box.parentElement
  return box && getComputedStyle(box).overflowX !== "auto" && box.scrollWidth > box.clientWidth
}).map(math => math.textContent.slice(0, 40))
"""


def test_no_page_is_wider_than_a_phone(browser: playwright.Browser) -> None:
    """Formulas that are, are scrolled in place."""
    view = browser.new_page(viewport={"width": 390, "height": 844})
    wide, cut = {}, {}
    for name in kinds(all_of=(*FOLDERS, "theory")):
        view.goto((SITE / name).as_uri(), wait_until="domcontentloaded")
        beyond = view.evaluate("document.documentElement.scrollWidth - innerWidth")
        if beyond > 0:
            wide[name] = beyond
        if formulas := view.evaluate(CUT_FORMULAS):
            cut[name] = formulas
    assert not wide
    assert not cut


def test_code_is_not_scrolled_beside_both_sidebars(browser: playwright.Browser) -> None:
    view = browser.new_page(viewport={"width": 1280 - SCROLLBAR, "height": 800})
    scrolled = {}
    for name in kinds(all_of=("guides", "theory")):
        view.goto((SITE / name).as_uri(), wait_until="domcontentloaded")
        if found := view.evaluate(SCROLLED):
            scrolled[name] = found
    assert not scrolled


@pytest.mark.parametrize("name", ["start/index.html", "zh/start/index.html"])
def test_the_header_keeps_one_row(browser: playwright.Browser, name: str) -> None:
    view = browser.new_page(viewport={"width": 390, "height": 800})
    view.goto((site() / name).as_uri())
    height = view.evaluate(HEADER)
    for width in (768, 960 - SCROLLBAR, 960, 970, 1100, 1200, 1201, 1280):
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate(HEADER) == height, width


@pytest.mark.parametrize("name", ["methods/rope.html", "methods/floater.html", "theory/rope.html"])
def test_titles_and_charts_side_by_side_are_level(browser: playwright.Browser, name: str) -> None:
    page = Visit(browser, site() / name, viewport={"width": 1280, "height": 800}).page
    for part in ("p", "svg"):
        tops = page.evaluate(TOPS, part)
        assert len(tops) >= 2
        assert all(abs(one - other) < 1 for one, other in zip(tops[::2], tops[1::2], strict=False))


def test_files_of_charts_follow_a_dark_page(browser: playwright.Browser) -> None:
    for name in ("index.html", "results/language.html", "gallery/index.html"):
        page = Visit(browser, site() / name, color_scheme="dark").page
        filters = page.locator(".bd-article img").evaluate_all(
            "all => all.map((e) => getComputedStyle(e).filter)"
        )
        assert filters
        assert all(value.startswith("invert") for value in filters), name


def test_methods_are_filtered(browser: playwright.Browser) -> None:
    page = Visit(browser, site() / "choose/index.html").page
    rows = page.locator(".choices tbody tr:visible")
    every = rows.count()
    page.get_by_label("mask").select_option("causal only")
    assert 0 < rows.count() < every
    page.get_by_label("mask").select_option("")
    page.get_by_label("words").fill("gpt-oss")
    assert rows.all_inner_texts()[0].startswith("rope")
    assert page.locator(".choices output").inner_text() == f"1 of {every} methods"


def test_formulas_are_written_along_the_line(browser: playwright.Browser) -> None:
    page = Visit(browser, site() / "methods/rope.html").page
    sizes = [formula.bounding_box() for formula in page.locator(".formula math").all()]
    assert sizes
    assert all(size is not None and size["width"] > 2 * size["height"] for size in sizes)


LONG = ("methods/index.html", "extensions/index.html", "reference/transformers-models.html")
TALLEST = 3500
"""Pixels of a page of long tables, at any width."""


@pytest.mark.parametrize("name", LONG)
def test_long_tables_are_filtered_and_short(browser: playwright.Browser, name: str) -> None:
    page = Visit(browser, site() / name, viewport={"width": 1280, "height": 800}).page
    tables = page.locator("table.filtered")
    for table in tables.all():
        rows = table.locator("tbody tr")
        assert table.locator("thead th").first.is_visible()
        form = table.locator("xpath=preceding::form[@class='filters'][1]")
        form.get_by_label("words").fill(rows.nth(5).locator("code").first.inner_text())
        assert 0 < rows.filter(visible=True).count() < rows.count()
        form.get_by_label("words").fill("")
        select = form.locator("select").first
        select.select_option(index=1)
        assert 0 < rows.filter(visible=True).count() < rows.count()
        select.select_option(index=0)
        assert rows.filter(visible=True).count() == rows.count()
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollHeight") < TALLEST


def test_long_tables_are_read_without_scripts(browser: playwright.Browser) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto((site() / "methods/index.html").as_uri())
    for table in page.locator("table.filtered").all():
        assert table.locator("tbody tr").filter(visible=True).count() > 50
        assert table.locator("thead").is_visible()
    assert page.locator("form.filters").count() == 0


@pytest.mark.parametrize("name", ["choose/index.html", "zh/choose/index.html"])
def test_a_row_is_a_paragraph_on_a_phone(browser: playwright.Browser, name: str) -> None:
    page = Visit(browser, site() / name, viewport={"width": 390, "height": 800}).page
    row = page.locator(".choices tbody tr").first
    cells = row.locator("td").filter(visible=True)
    assert 0 < cells.count() < row.locator("td").count(), "empty cells are left out"
    label = "(e) => getComputedStyle(e, '::before').content"
    assert cells.first.evaluate(label).strip('"').endswith(": ")
    assert page.locator(".choices thead").is_hidden()
    page.set_viewport_size({"width": 1280, "height": 800})
    assert page.locator(".choices thead").is_visible()
