"""The gallery in a real browser: legible in both schemes, on a phone, and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.lab.visualization.gallery import write_gallery
from tests.support.browsing import CHROMIUM, CONTRAST, CUT, STROKES, WIDE_FONT, Visit, browser

playwright = pytest.importorskip("playwright.sync_api")

__all__ = ["browser"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]
NAMES = ["alibi", "shaw", "sinusoidal", "nope", "learned"]


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "gallery.html"
    write_gallery(path, names=NAMES)
    return path


@pytest.fixture(scope="module")
def tab(browser: playwright.Browser, gallery: Path) -> Visit:
    """A tab in which each test opens the gallery anew."""
    return Visit(browser, gallery)


def test_draws_everything_without_network_or_errors(tab: Visit, gallery: Path) -> None:
    tab.open(gallery)
    assert tab.troubles == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [gallery.as_uri()]
    assert tab.page.locator("article").count() == len(NAMES)
    for plot in tab.page.locator(".plot svg").all():
        box = plot.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 200


def test_maps_are_decoded_and_in_their_place(tab: Visit, gallery: Path) -> None:
    tab.open(gallery)
    images = tab.page.locator("#alibi .plot image")
    assert images.count() == 4
    for image in images.all():
        assert image.bounding_box()["width"] > 80
    decoded = tab.page.evaluate(
        "Promise.all([...document.querySelectorAll('.plot image')].map((e) => {"
        " const image = new Image(); image.src = e.href.baseVal;"
        " return image.decode().then(() => image.naturalWidth); }))"
    )
    assert min(decoded) > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legible_in_both_schemes(tab: Visit, gallery: Path, scheme: str) -> None:
    tab.open(gallery, scheme=scheme)
    for selector in ("p", "dd", "figcaption span", "nav a", "dd a", ".plot text"):
        assert min(tab.page.evaluate(CONTRAST, selector)) >= 4.5, selector


@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (768, 2), (390, 1), (360, 1)])
def test_every_width_has_columns_and_whole_labels(
    tab: Visit, gallery: Path, width: int, columns: int
) -> None:
    """Whole in a font wider than the one that pictures are laid out with, too."""
    tab.open(gallery, width=width)
    script = "(e) => getComputedStyle(e).gridTemplateColumns.split(' ').length"
    assert tab.page.locator("nav ul").first.evaluate(script) == columns
    assert tab.page.locator(".plot text").count() > 100
    assert tab.page.evaluate(CUT, ".plot text") == []
    for plot in tab.page.locator(".plot svg").all():
        box = plot.bounding_box()
        assert box["x"] + box["width"] <= width + 1
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    tab.page.add_style_tag(content=WIDE_FONT)
    assert tab.page.evaluate(CUT, ".plot text") == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width

    for selector in (".plot .mark-line path", ".plot .role-axis-domain line", ".plot .mark-symbol"):
        ratios = tab.page.evaluate(STROKES, selector)
        assert min(ratios, default=9) >= 3, selector
    assert tab.page.evaluate(STROKES, ".plot .mark-line path")


def test_the_list_leads_to_each_method(tab: Visit, gallery: Path) -> None:
    tab.open(gallery)
    for name in NAMES:
        tab.page.locator(f"nav a[href='#{name}']").click()
        assert tab.page.url.endswith(f"#{name}")
        tab.page.locator(f"article#{name} h3").wait_for(state="visible")


def test_the_filter_hides_what_does_not_fit(tab: Visit, gallery: Path) -> None:
    tab.open(gallery)

    def shown() -> list[str]:
        articles = tab.page.locator("article:visible").all()
        return [str(article.get_attribute("id")) for article in articles]

    everything = shown()
    assert everything == ["sinusoidal", "alibi", "learned", "shaw", "nope"]
    tab.page.get_by_label("Filter").fill("relative score")
    assert shown() == ["alibi", "shaw"]
    assert tab.page.locator("#found").inner_text() == "2 of 5"
    assert tab.page.locator("nav li:visible").count() == 2
    assert tab.page.locator("main > section:visible").count() == 2
    tab.page.get_by_label("Filter").fill("")
    assert shown() == everything
    assert tab.troubles == []


def test_formulas_are_drawn_with_indices_below(tab: Visit, gallery: Path) -> None:
    tab.open(gallery)
    base, index = tab.page.locator("#alibi .formula msub").first.locator("> *").all()
    upper, lower = base.bounding_box(), index.bounding_box()
    assert lower["y"] + lower["height"] > upper["y"] + upper["height"]
    assert lower["x"] >= upper["x"] + upper["width"] - 1


def test_a_long_formula_in_a_line_keeps_to_a_phone(tab: Visit, tmp_path: Path) -> None:
    write_gallery(tmp_path / "t5.html", names=["t5"])
    tab.open(tmp_path / "t5.html", width=360)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
