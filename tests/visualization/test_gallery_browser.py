"""The gallery in a real browser: legible in both schemes, on a phone, and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from posenc.visualization.gallery import write_gallery
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


def test_draws_everything_without_network_or_errors(
    browser: playwright.Browser, gallery: Path
) -> None:
    visit = Visit(browser, gallery)
    assert visit.troubles == []
    assert [url for url in visit.requests if not url.startswith("data:")] == [gallery.as_uri()]
    assert visit.page.locator("article").count() == len(NAMES)
    for plot in visit.page.locator(".plot svg").all():
        box = plot.bounding_box()
        assert box is not None
        assert box["width"] > 200
        assert box["height"] > 200
    visit.page.close()


def test_maps_are_decoded_and_in_their_place(browser: playwright.Browser, gallery: Path) -> None:
    visit = Visit(browser, gallery)
    images = visit.page.locator("#alibi .plot image")
    assert images.count() == 4
    for image in images.all():
        box = image.bounding_box()
        assert box is not None
        assert box["width"] > 80
    decoded = visit.page.evaluate(
        "Promise.all([...document.querySelectorAll('.plot image')].map((e) => {"
        " const image = new Image(); image.src = e.href.baseVal;"
        " return image.decode().then(() => image.naturalWidth); }))"
    )
    assert min(decoded) > 200
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legible_in_both_schemes(browser: playwright.Browser, gallery: Path, scheme: str) -> None:
    visit = Visit(browser, gallery, color_scheme=scheme)
    for selector in ("p", "dd", "figcaption span", "nav a", "dd a", ".plot text"):
        ratios = visit.page.evaluate(CONTRAST, selector)
        assert ratios
        assert min(ratios) >= 4.5, (selector, min(ratios))
    visit.page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_label_is_cut(browser: playwright.Browser, gallery: Path, width: int) -> None:
    """Nor in a font wider than the one that pictures are laid out with."""
    visit = Visit(browser, gallery, viewport={"width": width, "height": 800})
    assert visit.page.locator(".plot text").count() > 100
    assert visit.page.evaluate(CUT, ".plot text") == []
    visit.page.add_style_tag(content=WIDE_FONT)
    assert visit.page.evaluate(CUT, ".plot text") == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_stand_out_in_both_schemes(
    browser: playwright.Browser, gallery: Path, scheme: str
) -> None:
    visit = Visit(browser, gallery, color_scheme=scheme)
    for selector in (".plot .mark-line path", ".plot .role-axis-domain line", ".plot .mark-symbol"):
        ratios = visit.page.evaluate(STROKES, selector)
        assert min(ratios, default=9) >= 3, selector
    assert visit.page.evaluate(STROKES, ".plot .mark-line path")
    visit.page.close()


def test_fits_a_phone(browser: playwright.Browser, gallery: Path) -> None:
    visit = Visit(browser, gallery, viewport={"width": 360, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
    for plot in visit.page.locator(".plot svg").all():
        box = plot.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 361
    visit.page.close()


def test_the_list_leads_to_each_method(browser: playwright.Browser, gallery: Path) -> None:
    visit = Visit(browser, gallery)
    for name in NAMES:
        visit.page.locator(f"nav a[href='#{name}']").click()
        assert visit.page.url.endswith(f"#{name}")
        visit.page.locator(f"article#{name} h3").wait_for(state="visible")
    visit.page.close()


def test_the_filter_hides_what_does_not_fit(browser: playwright.Browser, gallery: Path) -> None:
    visit = Visit(browser, gallery)

    def shown() -> list[str]:
        articles = visit.page.locator("article:visible").all()
        return [str(article.get_attribute("id")) for article in articles]

    everything = shown()
    assert everything == ["sinusoidal", "alibi", "learned", "shaw", "nope"]
    visit.page.get_by_label("Filter").fill("relative score")
    assert shown() == ["alibi", "shaw"]
    assert visit.page.locator("#found").inner_text() == "2 of 5"
    assert visit.page.locator("nav li:visible").count() == 2
    assert visit.page.locator("main > section:visible").count() == 2
    visit.page.get_by_label("Filter").fill("")
    assert shown() == everything
    assert visit.troubles == []
    visit.page.close()


@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (768, 2), (390, 1)])
def test_the_list_has_columns(
    browser: playwright.Browser, gallery: Path, width: int, columns: int
) -> None:
    visit = Visit(browser, gallery, viewport={"width": width, "height": 800})
    script = "(e) => getComputedStyle(e).gridTemplateColumns.split(' ').length"
    assert visit.page.locator("nav ul").first.evaluate(script) == columns
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.page.close()


def test_formulas_are_drawn_with_indices_below(browser: playwright.Browser, gallery: Path) -> None:
    visit = Visit(browser, gallery)
    base, index = visit.page.locator("#alibi .formula msub").first.locator("> *").all()
    upper, lower = base.bounding_box(), index.bounding_box()
    assert upper is not None
    assert lower is not None
    assert lower["y"] + lower["height"] > upper["y"] + upper["height"]
    assert lower["x"] >= upper["x"] + upper["width"] - 1
    visit.page.close()


def test_a_long_formula_in_a_line_keeps_to_a_phone(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    write_gallery(tmp_path / "t5.html", names=["t5"])
    visit = Visit(browser, tmp_path / "t5.html", viewport={"width": 360, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
    visit.page.close()
