"""The report in a real browser: it draws, answers the mouse, and asks the network for nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from posenc.bench.options import METHODS
from posenc.bench.report import write_bench
from posenc.evaluation.doctor.costs import Cost
from posenc.evaluation.doctor.diagnosis import diagnose
from posenc.evaluation.doctor.engines import Engines
from posenc.evaluation.doctor.report import write_diagnosis
from posenc.evaluation.report import write_study
from posenc.experiments.report import write_report
from tests.bench.test_report import report as benched_sample
from tests.evaluation.engines.released import RELEASED
from tests.support.browsing import CHROMIUM, CONTRAST, CUT, STROKES, Visit, browser
from tests.support.samples import sample, stretched_sample

playwright = pytest.importorskip("playwright.sync_api")

__all__ = ["browser"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample(), tmp_path_factory.mktemp("browser") / "report")


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, but seeds disagree on what all find, whose intervals are as wide as can be."""
    base = sample()
    shares = cycle([1.0, 0.9, 0.8, 0.2, 0.9, 1.0, 0.7, 1.0, 1.0, 0.8, 0.9, 0.5])
    wild = tuple(
        replace(m, value=next(shares)) if m.metric == "recall" else m for m in base.measurements
    )
    comparison = replace(base, measurements=wild)
    return write_report(comparison, tmp_path_factory.mktemp("browser") / "undecided")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(stretched_sample(), tmp_path_factory.mktemp("browser") / "study")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 24 methods, some of which have long names."""
    study = stretched_sample()
    like = next(found for found in study.findings if found.role == "method")
    more = tuple(replace(like, key=f"method_{n}:base={n}00000") for n in range(15))
    study = replace(study, findings=(*study.findings, *more))
    return write_study(study, tmp_path_factory.mktemp("browser") / "many")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with 21 methods, most of which have long names."""
    study = stretched_sample()
    like = next(found for found in study.findings if found.role == "method")
    count = sum(found.role == "method" for found in study.findings)
    keys = (f"self_extend_{n}:group=8,window=512" for n in range(21 - count))
    more = tuple(replace(like, key=key) for key in keys)
    study = replace(study, findings=(*study.findings, *more))
    return write_study(study, tmp_path_factory.mktemp("browser") / "crowded")


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All encodings that are timed by default, some of whose times are not known."""
    folder = tmp_path_factory.mktemp("browser")
    times = {name: (1.0 + 0.15 * n, 1.0 if n == 3 else 0.02) for n, name in enumerate(METHODS)}
    write_bench(benched_sample(**times), folder, command="posenc bench --quick")
    return folder / "index.html"


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that engines rotate differently, with costs."""
    model, folder = (tmp_path_factory.mktemp(name) for name in ("qwen", "browser"))
    fields = RELEASED["Qwen3-8B, YaRN of its card"]
    scaling = fields["rope_scaling"] | {"attention_factor": 1.0}
    (model / "config.json").write_text(json.dumps(fields | {"rope_scaling": scaling}))
    costs = tuple(
        Cost(n, 1e-9 * n * n, 4e3 * n, 5e-10 * n * n, 1e3 * n, measured=n < 9000)
        for n in (128, 2048, 32768)
    )
    found = replace(diagnose(model, budget=0, run_seconds=0), costs=costs)
    engines = Engines.of(model, "all")
    write_diagnosis(found, model, folder, engines=engines, command="posenc doctor qwen")
    return folder / "index.html"


ALL = ("comparison", "undecided", "study", "many", "benched", "diagnosed")


@pytest.fixture(scope="module", params=["comparison", "study", "benched", "diagnosed"])
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=["comparison", "study"])
def ranked(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_draws_everything_without_network_or_errors(
    browser: playwright.Browser, comparison: Path
) -> None:
    visit = Visit(browser, comparison, "html[data-drawn]")
    assert visit.troubles == []
    assert visit.requests == [comparison.as_uri()]
    assert visit.page.locator(".chart svg").count() == 6
    # Seven subjects less the one that cannot be tested make lines in the first chart.
    assert visit.page.locator("#chart-headline .mark-line path").count() == 7
    assert visit.page.locator("#chart-headline svg").bounding_box()["width"] > 600
    visit.page.close()


def test_hovering_shows_the_numbers(browser: playwright.Browser, comparison: Path) -> None:
    visit = Visit(browser, comparison, "html[data-drawn]")
    points = visit.page.locator("#chart-headline .mark-symbol.role-mark path")
    points.last.scroll_into_view_if_needed()
    points.last.hover(force=True)
    tooltip = visit.page.locator("#vg-tooltip-element")
    tooltip.wait_for(state="visible")
    text = tooltip.inner_text()
    assert "bits per byte" in text
    assert re.search(r"\(\S+ to \S+\)", text)
    assert any(name in text for name in ("alibi", "rope", "t5", "sinusoidal", "nope", "learned"))
    visit.page.close()


def test_clicking_a_name_singles_it_out(browser: playwright.Browser, comparison: Path) -> None:
    """In all charts; a second click undoes it."""
    faint = (
        "(count) => [...document.querySelectorAll('.mark-line path')].filter("
        "p => +(p.getAttribute('opacity') ?? p.style.opacity ?? 1) < 0.5).length === count"
    )
    visit = Visit(browser, comparison, "html[data-drawn]")
    lines = visit.page.locator(".mark-line path").count()
    button = visit.page.locator("button.pick", has_text="alibi")
    button.click()
    charts = visit.page.locator(".chart:has(.mark-line)").count()
    visit.page.wait_for_function(faint, arg=lines - charts)
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    visit.page.wait_for_function(faint, arg=0)
    visit.page.close()


@pytest.mark.parametrize("found", [*ALL, "crowded"])
@pytest.mark.parametrize(
    ("width", "height", "last"), [(1280, 800, 800), (768, 1024, 1536), (390, 844, 1266)]
)
def test_the_answer_is_on_the_first_screen(
    browser: playwright.Browser,
    request: pytest.FixtureRequest,
    found: str,
    width: int,
    height: int,
    last: int,
) -> None:
    """Chart, verdicts and the command that settles the rest; on a phone in a screen and a half."""
    page = request.getfixturevalue(found)
    visit = Visit(browser, page, "html[data-drawn]", viewport={"width": width, "height": height})
    assert visit.troubles == []

    def box(selector: str) -> dict[str, float]:
        found = visit.page.locator(selector).first.bounding_box()
        assert found is not None
        return found

    parts = (".facts-line", "h1", ".first .chart", ".verdicts", ".first > div:last-child")
    facts, heading, chart, verdicts, settle = map(box, parts)
    assert len(visit.page.locator("h1").inner_text()) <= 90
    assert facts["height"] < 70
    assert facts["y"] < heading["y"] < chart["y"]
    for part in (chart, verdicts, settle):
        assert part["y"] + part["height"] <= last
    if width == 1280:
        assert chart["x"] + chart["width"] <= verdicts["x"]
    for command in visit.page.locator("#settle code").all():
        assert command.inner_text().startswith("posenc ")
    assert visit.page.locator("#settle code").count() >= (found in ("undecided", "benched"))
    assert visit.page.locator(".verdicts tbody .verdict").count() >= 6
    assert settle["y"] + settle["height"] <= box(".multiples")["y"] < box("#method")["y"]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.page.close()


def test_further_verdicts_are_folded(browser: playwright.Browser, many: Path) -> None:
    visit = Visit(browser, many, "html[data-drawn]")
    rest = visit.page.locator(".rest .verdict")
    assert rest.count() == 2 * (24 - 6)
    assert not rest.first.is_visible()
    visit.page.click("text=18 more")
    assert rest.last.is_visible()
    visit.page.close()


def test_paper_has_folded_verdicts_and_words(browser: playwright.Browser, many: Path) -> None:
    visit = Visit(browser, many, "html[data-drawn]")
    visit.page.emulate_media(media="print")
    for selector, count in (("details .verdict", 2 * (24 - 6)), ("details dd", 4)):
        heights = visit.page.locator(selector).evaluate_all(
            "all => all.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().height)"
        )
        assert len(heights) == count
        assert min(heights) > 5
    visit.page.close()


def test_axes_below_one_have_plain_numbers(browser: playwright.Browser, diagnosed: Path) -> None:
    """0.01 seconds are not 10m; the title stands right below the labels."""
    visit = Visit(browser, diagnosed, "html[data-drawn]")
    texts = visit.page.locator("#chart-seconds .role-axis text")
    labels = texts.all_text_contents()
    assert {"0.00001", "0.01", "0.1", "1"} <= set(labels)
    assert not [text for text in labels if re.search(r"\d[mµ]$", text)]
    title, label = (texts.nth(labels.index(text)).bounding_box() for text in ("tokens", "2048"))
    assert title is not None
    assert label is not None
    assert title["y"] - label["y"] - label["height"] < 15
    visit.page.close()


def test_words_are_defined_where_they_stand(browser: playwright.Browser, page: Path) -> None:
    visit = Visit(browser, page, "html[data-drawn]")
    words = visit.page.locator(".verdicts .verdict").all()
    defined = set(visit.page.locator("details dt").all_text_contents())
    assert defined
    for word in words:
        text = word.text_content() or ""  # of those that are folded, too
        assert text in defined
        assert str(word.get_attribute("title")).startswith(f"{text}: ")
    assert not visit.page.locator("details dd").first.is_visible()
    visit.page.click("details:has(dd) summary")
    assert visit.page.locator("details dd").last.is_visible()
    visit.page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_cut(browser: playwright.Browser, page: Path, width: int) -> None:
    visit = Visit(browser, page, "html[data-drawn]", viewport={"width": width, "height": 800})
    assert visit.page.locator(".chart text").count() > 30
    assert visit.page.evaluate(CUT, ".chart text") == []
    visit.page.close()


def test_without_scripts_charts_are_pictures(browser: playwright.Browser, page: Path) -> None:
    visit = Visit(browser, page, java_script_enabled=False)
    pictures = visit.page.locator(".chart img")
    keys = {path.stem for path in page.parent.glob("*.png")}
    assert pictures.count() == len(keys)
    assert {Path(url).stem for url in visit.requests[1:]} == keys
    assert all(url.startswith(page.parent.as_uri()) for url in visit.requests)
    assert visit.troubles == []
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        shown = picture.bounding_box()
        assert shown is not None
        assert shown["width"] > 300
        assert shown["height"] > 150
    assert visit.page.locator("button.copy:visible").count() == 0
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legible_in_both_schemes(browser: playwright.Browser, page: Path, scheme: str) -> None:
    visit = Visit(browser, page, "html[data-drawn]", color_scheme=scheme)
    assert visit.page.evaluate("document.documentElement.dataset.drawn") == scheme
    rows = visit.page.locator(".mark-line").count() == 0  # of amounts, whose names are ticks
    for selector in (
        "p",
        "td",
        "th",
        ".verdict",
        ".role-axis text",
        ".mark-text text:not([stroke])",
    ):
        ratios = visit.page.evaluate(CONTRAST, selector)
        assert ratios or (rows and selector.startswith(".mark-text"))
        assert min(ratios, default=21) >= 4.5, (selector, min(ratios))
    for selector in (".mark-line path", ".mark-rule.role-mark line", ".role-axis-domain line"):
        ratios = visit.page.evaluate(STROKES, selector)
        assert ratios or rows
        assert min(ratios, default=21) >= 3, (selector, min(ratios))
    visit.page.close()


def test_charts_follow_a_change_of_scheme(browser: playwright.Browser, comparison: Path) -> None:
    visit = Visit(browser, comparison, "html[data-drawn]", color_scheme="light")
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_selector("html[data-drawn=dark]")
    assert min(visit.page.evaluate(CONTRAST, ".role-axis text")) >= 4.5
    visit.page.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("found", ALL)
def test_shows_every_number_of_the_table(
    browser: playwright.Browser, request: pytest.FixtureRequest, found: str, width: int
) -> None:
    """Nothing is cut, and nothing is to be scrolled aside for, on a phone either."""
    page = request.getfixturevalue(found)
    visit = Visit(browser, page, "html[data-drawn]", viewport={"width": width, "height": 800})
    assert visit.troubles == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    ends = visit.page.locator(".results td").evaluate_all(
        "cells => cells.filter(c => c.checkVisibility()).map(c => c.getBoundingClientRect().right)"
    )
    assert len(ends) >= 20
    assert max(ends) <= width
    overhang = "tables => tables.map(t => t.scrollWidth - t.clientWidth)"
    assert max(visit.page.locator(".scroll").evaluate_all(overhang)) <= 0
    visit.page.close()


def test_a_table_is_sorted_by_a_click(browser: playwright.Browser, ranked: Path) -> None:
    page = ranked
    visit = Visit(browser, page, "html[data-drawn]")
    for name, column in (("128", None), ("memory", -2 if "report" in str(page) else -1)):
        button = visit.page.locator(".results button.sort", has_text=name).first
        values = []
        for _ in range(2):
            button.click()
            heads = visit.page.locator(".results [aria-sort=ascending], [aria-sort=descending]")
            assert heads.count() == 1
            rows = visit.page.locator(".results tbody tr").evaluate_all(
                "(rows, at) => rows.map(r => r.cells[at < 0 ? r.cells.length + at : at]"
                ".dataset.value).filter(v => v).map(Number)",
                column if column is not None else (4 if "report" in str(page) else 1),
            )
            values.append(rows)
        assert values[0] == sorted(values[0])
        assert values[1] == sorted(values[1], reverse=True)
    visit.page.close()


def test_charts_have_words_for_those_who_cannot_see_them(
    browser: playwright.Browser, page: Path
) -> None:
    visit = Visit(browser, page, "html[data-drawn]")
    told = visit.page.locator(".chart").evaluate_all(
        "charts => charts.map(c => [c.id, c.role, c.ariaLabel])"
    )
    for key, role, words in told:
        assert role in ("img", "graphics-document"), "Vega says the second once it has drawn"
        assert " against " in words
        assert words.count(";") >= (
            0 if key in ("chart-turns", "chart-seconds", "chart-bytes") else 5
        )
    visit.page.close()


def test_paper_keeps_headings_with_what_follows(browser: playwright.Browser, page: Path) -> None:
    visit = Visit(browser, page, "html[data-drawn]")
    visit.page.emulate_media(media="print")
    for selector, rule, value in (
        ("h2", "break-after", "avoid"),
        (".figure", "break-inside", "avoid"),
        (".scroll", "overflow-x", "visible"),
        ("#copy", "display", "none"),
    ):
        styles = visit.page.locator(selector).evaluate_all(
            "(all, rule) => all.map(e => getComputedStyle(e).getPropertyValue(rule))", rule
        )
        assert set(styles) == {value}, selector
    visit.page.close()


def test_the_command_can_be_copied(browser: playwright.Browser, comparison: Path) -> None:
    context = browser.new_context()
    page = context.new_page()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(comparison.as_uri())
    page.wait_for_selector("html[data-drawn]")
    page.click("#copy")
    page.wait_for_function("document.querySelector('#copy').textContent === 'Copied'")
    context.close()
