"""The report in a real browser: it draws, answers the mouse, and asks the network for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.browsing import CHROMIUM, CONTRAST, CUT, STROKES, Visit, browser, playwright
from tests.support.exhaustive import in_turn

__all__ = ["browser"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]

KINDS = ("comparison", "study", "benched", "diagnosed")
"""A report of each command."""
ALL = ("undecided", "many", *KINDS)


DRAWN = "html[data-drawn]"
"""Selector of a report whose charts are drawn."""


def views(
    *names: str, widths: tuple[int, ...] = (1280,), rounds: int | None = None
) -> pytest.MarkDecorator:
    """Call a test with each of some reports at each of some widths; each is loaded once for all.

    Args:
        names: of reports.
        widths: of windows, in pixels.
        rounds: in which they take turns; all meet if None.
    """
    cases = in_turn(rounds or len(widths), names, widths)
    found = [pytest.param(case.values, id=case.id, marks=case.marks) for case in cases]
    return pytest.mark.parametrize("view", found, indirect=True, scope="module")


def opened(browser: playwright.Browser, comparison: Path) -> Visit:
    return Visit(browser, comparison, DRAWN)


shown = pytest.fixture(opened, scope="module", name="shown")
"""The tab of ``view``."""
tab = pytest.fixture(opened, scope="module", name="tab")
"""A tab in which a test opens a report anew, to change it."""


@pytest.fixture(scope="module")
def view(request: pytest.FixtureRequest, shown: Visit) -> Visit:
    """A report, by its name and the width of the window, for tests that leave it as it is."""
    name, width = request.param
    shown.open(request.getfixturevalue(name), DRAWN, width=width)
    return shown


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@views("comparison")
def test_draws_everything_without_network_or_errors(view: Visit, comparison: Path) -> None:
    assert view.troubles == []
    assert view.requests == [comparison.as_uri()]
    assert view.page.locator(".chart svg").count() == 6
    # Seven subjects less the one that cannot be tested make lines in the first chart.
    assert view.page.locator("#chart-headline .mark-line path").count() == 7
    assert view.page.locator("#chart-headline svg").bounding_box()["width"] > 600


def test_hovering_shows_the_numbers(tab: Visit, comparison: Path) -> None:
    tab.open(comparison, DRAWN)
    points = tab.page.locator("#chart-headline .mark-symbol.role-mark path")
    points.last.scroll_into_view_if_needed()
    points.last.hover(force=True)
    tooltip = tab.page.locator("#vg-tooltip-element")
    tooltip.wait_for(state="visible")
    text = tooltip.inner_text()
    assert "bits per byte" in text
    assert re.search(r"\(\S+ to \S+\)", text)
    assert any(name in text for name in ("alibi", "rope", "t5", "sinusoidal", "nope", "learned"))


def test_clicking_a_name_singles_it_out(tab: Visit, comparison: Path) -> None:
    """In all charts; a second click undoes it."""
    faint = (
        "(count) => [...document.querySelectorAll('.mark-line path')].filter("
        "p => +(p.getAttribute('opacity') ?? p.style.opacity ?? 1) < 0.5).length === count"
    )
    tab.open(comparison, DRAWN)
    lines = tab.page.locator(".mark-line path").count()
    button = tab.page.locator("button.pick", has_text="alibi")
    button.click()
    charts = tab.page.locator(".chart:has(.mark-line)").count()
    tab.page.wait_for_function(faint, arg=lines - charts)
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    tab.page.wait_for_function(faint, arg=0)


STYLE = "(all, rule) => all.map((e) => getComputedStyle(e).getPropertyValue(rule))"
LAST = {1280: 800, 768: 1536, 390: 1266}
"""Pixels of the first screen by width; on a phone of a screen and a half."""


@views(*ALL, "crowded", widths=(1280, 768, 390), rounds=2)
def test_the_answer_is_on_the_first_screen(view: Visit, request: pytest.FixtureRequest) -> None:
    """Chart, verdicts and the command that settles the rest; on a phone in a screen and a half."""
    found, width = request.node.callspec.params["view"]
    last = LAST[width]
    assert view.troubles == []

    def box(selector: str) -> dict[str, float]:
        return view.page.locator(selector).first.bounding_box()

    parts = (".facts-line", "h1", ".first .chart", ".verdicts", ".first > div:last-child")
    facts, heading, chart, verdicts, settle = map(box, parts)
    assert len(view.page.locator("h1").inner_text()) <= 90
    assert facts["height"] < 70
    assert facts["y"] < heading["y"] < chart["y"]
    for part in (chart, verdicts, settle):
        assert part["y"] + part["height"] <= last
    if width == 1280:
        assert chart["x"] + chart["width"] <= verdicts["x"]
    for command in view.page.locator("#settle code").all():
        assert command.inner_text().startswith("posenc ")
    assert view.page.locator("#settle code").count() >= (found in ("undecided", "benched"))
    assert view.page.locator(".verdicts tbody .verdict").count() >= 6
    multiples, details = map(box, (".multiples", ".multiples + section"))
    assert settle["y"] + settle["height"] <= multiples["y"] < details["y"]
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width


def test_further_verdicts_are_folded(tab: Visit, many: Path) -> None:
    tab.open(many, DRAWN)
    rest = tab.page.locator(".rest .verdict")
    assert rest.count() == 2 * (24 - 6)
    assert not rest.first.is_visible()
    tab.page.click("text=18 more")
    assert rest.last.is_visible()


def test_paper_has_folded_verdicts_and_words(tab: Visit, many: Path) -> None:
    tab.open(many, DRAWN)
    tab.page.emulate_media(media="print")
    for selector, count in (("details .verdict", 2 * (24 - 6)), ("details dd", 4)):
        heights = tab.page.locator(selector).evaluate_all(
            "all => all.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) == count
        assert min(heights) > 5


@views("diagnosed")
def test_axes_below_one_have_plain_numbers(view: Visit) -> None:
    """0.01 seconds are not 10m; the title stands right below the labels."""
    texts = view.page.locator("#chart-seconds .role-axis text")
    labels = texts.all_text_contents()
    assert {"0.00001", "0.01", "0.1", "1"} <= set(labels)
    assert not [text for text in labels if re.search(r"\d[mµ]$", text)]
    title, label = (texts.nth(labels.index(text)).bounding_box() for text in ("tokens", "2048"))
    assert title["y"] - label["y"] - label["height"] < 15


@views(*KINDS)
def test_words_are_defined_where_they_stand(view: Visit) -> None:
    words = view.page.locator(".verdicts .verdict").all()
    defined = set(view.page.locator("details dt").all_text_contents())
    assert defined
    for word in words:
        text = word.text_content() or ""  # of those that are folded, too
        assert text in defined
        assert str(word.get_attribute("title")).startswith(f"{text}: ")
    assert not view.page.locator("details dd").first.is_visible()
    view.page.click("details:has(dd) summary")
    assert view.page.locator("details dd").last.is_visible()
    view.page.click("details:has(dd) summary")
    assert not view.page.locator("details dd").last.is_visible()


@views(*KINDS, widths=(1280, 390))
def test_no_label_is_cut(view: Visit) -> None:
    assert view.page.locator(".chart text").count() > 30
    assert view.page.evaluate(CUT, ".chart text") == []


@pytest.fixture(scope="module")
def scriptless(browser: playwright.Browser, comparison: Path) -> Visit:
    return Visit(browser, comparison, java_script_enabled=False)


def test_without_scripts_charts_are_pictures(scriptless: Visit, page: Path) -> None:
    scriptless.open(page)
    pictures = scriptless.page.locator(".chart img")
    keys = {path.stem for path in page.parent.glob("*.png")}
    assert pictures.count() == len(keys)
    charts = scriptless.page.locator(".chart[role=img]")
    words = charts.evaluate_all("charts => charts.map(c => c.ariaLabel)")
    assert len(words) == len(keys)
    assert all(" against " in text for text in words)
    assert {Path(url).stem for url in scriptless.requests[1:]} == keys
    assert all(url.startswith(page.parent.as_uri()) for url in scriptless.requests)
    assert scriptless.troubles == []
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        shown = picture.bounding_box()
        assert shown["width"] > 300
        assert shown["height"] > 150
    assert scriptless.page.locator("button.copy:visible").count() == 0


def check_contrasts(page: playwright.Page) -> None:
    """Assert that words and lines stand out from the paper."""
    rows = page.locator(".mark-line").count() == 0  # of amounts, whose names are ticks
    texts = (".role-axis text", ".mark-text text:not([stroke])")
    for selector in ("p", "td", "th", ".verdict", *texts):
        ratios = page.evaluate(CONTRAST, selector)
        assert ratios or (rows and selector.startswith(".mark-text"))
        assert min(ratios, default=21) >= 4.5, (selector, min(ratios))
    for selector in (".mark-line path", ".mark-rule.role-mark line", ".role-axis-domain line"):
        ratios = page.evaluate(STROKES, selector)
        assert ratios or rows
        assert min(ratios, default=21) >= 3, (selector, min(ratios))


@views(*KINDS)
def test_legible_in_the_light_scheme(view: Visit) -> None:
    assert view.page.evaluate("document.documentElement.dataset.drawn") == "light"
    check_contrasts(view.page)


def test_legible_in_the_dark_scheme(tab: Visit, page: Path) -> None:
    tab.open(page, DRAWN, scheme="dark")
    assert tab.page.evaluate("document.documentElement.dataset.drawn") == "dark"
    check_contrasts(tab.page)


def test_charts_follow_a_change_of_scheme(tab: Visit, comparison: Path) -> None:
    tab.open(comparison, DRAWN)
    tab.page.emulate_media(color_scheme="dark")
    tab.page.wait_for_selector("html[data-drawn=dark]")
    assert min(tab.page.evaluate(CONTRAST, ".role-axis text")) >= 4.5


@views(*ALL, widths=(1280, 390))
def test_shows_every_number_of_the_table(view: Visit) -> None:
    """Nothing is cut, and nothing is to be scrolled aside for, on a phone either."""
    assert view.troubles == []
    width = view.page.viewport_size["width"]
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width
    ends = view.page.locator(".results td").evaluate_all(
        "cells => cells.filter(c => c.checkVisibility()).map(c => c.getBoundingClientRect().right)"
    )
    assert len(ends) >= 20
    assert max(ends) <= width
    overhang = "tables => tables.map(t => t.scrollWidth - t.clientWidth)"
    assert max(view.page.locator(".scroll").evaluate_all(overhang)) <= 0


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("comparison", {"128": 4, "memory": -2}), ("study", {"128": 1, "memory": -1})],
)
def test_a_table_is_sorted_by_a_click(
    tab: Visit, request: pytest.FixtureRequest, kind: str, columns: dict[str, int]
) -> None:
    tab.open(request.getfixturevalue(kind), DRAWN)
    cells = "(rows, at) => rows.map(r => [...r.cells].at(at).dataset.value)"
    for name, column in columns.items():
        button = tab.page.locator(".results button.sort", has_text=name).first
        values = []
        for _ in range(2):
            button.click()
            heads = tab.page.locator(".results [aria-sort=ascending], [aria-sort=descending]")
            assert heads.count() == 1
            found = tab.page.locator(".results tbody tr").evaluate_all(cells, column)
            values.append([float(value) for value in found if value])
        assert values[0] == sorted(values[0])
        assert values[1] == sorted(values[1], reverse=True)


@views(*KINDS)
def test_charts_have_words_for_those_who_cannot_see_them(view: Visit) -> None:
    told = view.page.locator(".chart").evaluate_all(
        "charts => charts.map(c => [c.id, c.role, c.ariaLabel])"  # as Vega has put them
    )
    for key, role, words in told:
        assert role in ("img", "graphics-document"), "Vega says the second once it has drawn"
        assert " against " in words
        few = key in ("chart-turns", "chart-seconds", "chart-bytes")
        assert few or words.count(";") >= 5


@views(*KINDS)
def test_paper_keeps_headings_with_what_follows(view: Visit) -> None:
    expected = {
        ("h2", "break-after"): {"avoid"},
        (".figure", "break-inside"): {"avoid"},
        (".scroll", "overflow-x"): {"visible"},
        ("#copy", "display"): {"none"},
    }
    view.page.emulate_media(media="print")
    styles = {
        (selector, rule): set(view.page.locator(selector).evaluate_all(STYLE, rule))
        for selector, rule in expected
    }
    view.page.emulate_media(media="screen")
    assert styles == expected


def test_the_command_can_be_copied(tab: Visit, comparison: Path) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.open(comparison, DRAWN)
    page.click("#copy")
    page.wait_for_function("document.querySelector('#copy').textContent === 'Copied'")


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
