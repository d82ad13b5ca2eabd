"""Pages of each kind in Chromium: accessible, in both schemes, and no wider than a phone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.browsing import CHROMIUM, Visit, browser, playwright
from tests.website.built import pages, site

axe = pytest.importorskip("axe_playwright_python")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]

__all__ = ["browser"]  # a fixture

FOLDERS = ("start", "choose", "guides", "about")
"""Whose pages are looked at one by one; of other folders, such as results by one template, two."""

CHINESE = ("zh/index.html", "zh/choose/index.html", "zh/guides/accelerate.html")
"""Pages of Chinese words, filters and code that are checked for violations as English ones are."""

ROWS = 3
"""Rows of each table that are checked for violations, which depend on the kind of a cell."""

AROUND = (".bd-header", ".bd-sidebar-primary", ".bd-footer")
"""Parts around a page, which are checked on the first page of each folder."""

KINDS = """((exclude) => {
  const seen = new Set();
  const style = (e) => {
    const { color, fontSize, fontWeight, opacity } = getComputedStyle(e), grounds = [];
    for (let at = e; at; at = at.parentElement) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(at);
      grounds.push(backgroundColor + backgroundImage + opacity); }
    return [color, fontSize, fontWeight, opacity, ...new Set(grounds)].join(); };
  return [...document.querySelectorAll("body *")].filter((e) => {
    const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!words || !e.checkVisibility() || exclude.some((part) => e.closest(part))) return false;
    const key = style(e), first = !seen.has(key);
    seen.add(key);
    return first; }); })"""
"""The first element with words of its own of each colour, size and ground: its contrast is that of
all others of its kind, and looking for what lies behind each takes most of a second a page."""

CHECK = f"""async ([contrast, kinds, exclude]) => {{
  const only = contrast ? {{ runOnly: {{ type: "rule", values: ["color-contrast"] }} }}
    : {{ rules: {{ "color-contrast": {{ enabled: false }} }} }};
  const context = kinds ? {{ include: {KINDS}(exclude), exclude }} : {{ exclude }};
  const found = await axe.run(context, {{ resultTypes: ["violations"], ...only }});
  return found.violations.filter((v) => ["serious", "critical"].includes(v.impact))
    .flatMap(({{ id, nodes }}) => nodes.map(
      (n) => `${{id}}: ${{n.html.slice(0, 99)}} ${{n.failureSummary}}`)); }}"""

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


CUT_FORMULAS = """() => [...document.querySelectorAll("math")].filter((math) => {
    let box = math.parentElement;
    while (box && getComputedStyle(box).overflowX === "visible") box = box.parentElement;
    return box && getComputedStyle(box).overflowX !== "auto" && box.scrollWidth > box.clientWidth;
  }).map((math) => math.textContent.slice(0, 40))"""
"""Formulas that reach out of a box that does not scroll."""

SHORTER = """(rows) => document.querySelectorAll(`tbody tr:nth-child(n + ${rows + 1})`)
  .forEach((row) => row.remove())"""


class Seen(NamedTuple):
    """A page as it was seen: on a phone, then beside both sidebars, then in both schemes."""

    troubles: list[str]
    outside: list[str]
    beyond: list[int]
    cut: list[str]
    scrolled: list[str]
    light: list[str]
    dark: list[str]


def see(visit: Visit, name: str, *, rows: int | None) -> Seen:
    """Load a page once and look at it in each way.

    Args:
        visit: the tab.
        name: of the page.
        rows: of each table that are checked for violations; all if None, no page's if 0.
    """
    page = visit.open(site() / name, width=390)
    outside = [url for url in visit.requests if not url.startswith(("file:", "data:"))]
    troubles = list(visit.troubles)  # before axe reads the styles, which a file may not
    over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    cut = page.evaluate(CUT_FORMULAS)
    page.set_viewport_size({"width": 1280 - SCROLLBAR, "height": 800})
    scrolled = page.evaluate(SCROLLED)
    light, dark = [], []
    if rows != 0:
        if rows is not None:
            page.evaluate(SHORTER, rows)
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
        exclude = () if rows is None or name.endswith("index.html") else AROUND
        kinds = rows is not None
        light = page.evaluate(CHECK, [False, False, exclude])
        light += page.evaluate(CHECK, [True, kinds, exclude])
        page.add_style_tag(content="* { transition: none !important; }")
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(DARK)
        dark = page.evaluate(CHECK, [True, kinds, exclude])
    return Seen(troubles, outside, [over] if over > 0 else [], cut, scrolled, light, dark)


@pytest.fixture(scope="module")
def tab(browser: playwright.Browser) -> Visit:
    """A tab in which each test opens its page anew."""
    return Visit(browser, site() / "index.html", reduced_motion="reduce")


@pytest.fixture(scope="module")
def seen(tab: Visit) -> dict[str, Seen]:
    checked = [name for name in kinds() if not name.startswith("zh/") or name in CHINESE]
    names = kinds(all_of=(*FOLDERS, "theory"))
    return {name: see(tab, name, rows=ROWS if name in checked else 0) for name in names}


@pytest.mark.parametrize("field", Seen._fields)
def test_nothing_is_wrong_with_a_page(seen: dict[str, Seen], field: str) -> None:
    assert {name: getattr(page, field) for name, page in seen.items() if getattr(page, field)} == {}


@pytest.mark.exhaustive
def test_nothing_is_wrong_with_any_row(tab: Visit) -> None:
    """Of the tables of all pages of a kind and of all results, Chinese ones too."""
    found = {name: see(tab, name, rows=None) for name in kinds(all_of=("results",))}
    assert {name: page for name, page in found.items() if any(page)} == {}


@pytest.mark.parametrize("name", ["start/index.html", "zh/start/index.html"])
def test_the_header_keeps_one_row(tab: Visit, name: str) -> None:
    view = tab.open(site() / name, width=390)
    height = view.evaluate(HEADER)
    for width in (768, 960 - SCROLLBAR, 960, 970, 1100, 1200, 1201, 1280):
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate(HEADER) == height, width


@pytest.mark.parametrize("name", ["methods/rope.html", "methods/floater.html", "theory/rope.html"])
def test_titles_and_charts_side_by_side_are_level(tab: Visit, name: str) -> None:
    page = tab.open(site() / name)
    for part in ("p", "svg"):
        tops = page.evaluate(TOPS, part)
        assert len(tops) >= 2
        assert all(abs(one - other) < 1 for one, other in zip(tops[::2], tops[1::2], strict=False))


def test_files_of_charts_follow_a_dark_page(tab: Visit) -> None:
    for name in ("index.html", "results/language.html", "gallery/index.html"):
        page = tab.open(site() / name, scheme="dark")
        style = "all => all.map((e) => getComputedStyle(e).filter.split('(')[0])"
        assert set(page.locator(".bd-article img").evaluate_all(style)) == {"invert"}, name


def test_methods_are_filtered(tab: Visit) -> None:
    page = tab.open(site() / "choose/index.html")
    rows = page.locator(".choices tbody tr:visible")
    every = rows.count()
    page.get_by_label("mask").select_option("causal only")
    assert 0 < rows.count() < every
    page.get_by_label("mask").select_option("")
    page.get_by_label("words").fill("gpt-oss")
    assert rows.all_inner_texts()[0].startswith("rope")
    assert page.locator(".choices output").inner_text() == f"1 of {every} methods"


def test_formulas_are_written_along_the_line(tab: Visit) -> None:
    page = tab.open(site() / "methods/rope.html")
    sizes = [formula.bounding_box() for formula in page.locator(".formula math").all()]
    assert sizes
    assert all(size["width"] > 2 * size["height"] for size in sizes)


LONG = ("methods/index.html", "extensions/index.html", "reference/transformers-models.html")
TALLEST = 3500
"""Pixels of a page of long tables, at any width."""


@pytest.mark.parametrize("name", LONG)
def test_long_tables_are_filtered_and_short(tab: Visit, name: str) -> None:
    page = tab.open(site() / name)
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
def test_a_row_is_a_paragraph_on_a_phone(tab: Visit, name: str) -> None:
    page = tab.open(site() / name, width=390)
    row = page.locator(".choices tbody tr").first
    cells = row.locator("td").filter(visible=True)
    assert 0 < cells.count() < row.locator("td").count(), "empty cells are left out"
    label = "(e) => getComputedStyle(e, '::before').content"
    assert cells.first.evaluate(label).strip('"').endswith(": ")
    assert page.locator(".choices thead").is_hidden()
    page.set_viewport_size({"width": 1280, "height": 800})
    assert page.locator(".choices thead").is_visible()
