"""The explorer: its formulas equal the library, and its page works without network for everyone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import posenc
from posenc import Encoding, Grid, Layout
from posenc.encodings.score.fire import Fire
from posenc.encodings.score.kerple import Kerple
from posenc.encodings.score.t5 import T5
from posenc.extension import applicable, extend
from tests.support.browsing import CHROMIUM, CONTRAST, Visit, browser
from tests.support.exhaustive import in_turn

playwright = pytest.importorskip("playwright.sync_api")

__all__ = ["browser"]  # a fixture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "_extra" / "explorer"
PAGE = FOLDER / "sliders.html"
LENGTH, TRAINED, FACTOR, WIDTH, HEADS, CONTENT = 90, 32, 3, 16, 6, 4.0
SIZES = {"length": LENGTH, "trained": TRAINED, "width": WIDTH, "heads": HEADS, "content": CONTENT}


@pytest.fixture(scope="module")
def formulas(browser: playwright.Browser) -> Iterator[playwright.Page]:
    page = browser.new_page()
    page.add_script_tag(path=FOLDER / "formulas.js")
    yield page
    page.close()


def explored(formulas: playwright.Page, state: dict[str, Any]) -> Tensor:
    """Logits of the script, with NaN for keys ahead."""
    rows = formulas.evaluate(
        """(state) => { const { logit } = Formulas.model(state);
        return Array.from({ length: state.length }, (_, i) =>
          Array.from({ length: i + 1 }, (_, j) => logit(i, j))); }""",
        state,
    )
    logits = torch.full((state["length"],) * 2, torch.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        logits[i, : i + 1] = torch.tensor(row, dtype=torch.float64)
    return logits


def logits_of(encoding: Encoding, heads: int = HEADS) -> Tensor:
    """The library's logits of each head for equal contents, with NaN for keys ahead."""
    positions = torch.arange(LENGTH, dtype=torch.float64)
    grid = Grid.of(Layout.at(positions), causal=True)
    each = math.sqrt(CONTENT / math.sqrt(WIDTH))
    q = k = torch.full((1, heads, LENGTH, WIDTH), each, dtype=torch.float64)
    scale = WIDTH**-0.5
    with torch.no_grad():
        if encoding.query_key is not None:
            q, k = encoding.query_key(q, k, grid)
        score = encoding.score
        replaced = score is not None and score.replaces_product
        logits = torch.zeros(()) if replaced else scale * q @ k.mT
        if score is not None:
            logits = logits + score(q, k, grid, scale=scale)
    ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return logits.expand(1, heads, LENGTH, LENGTH)[0].double().masked_fill(ahead, torch.nan)


def created(method: str, size: float = 1.0, shape: float = 0.5, **options: Any) -> Encoding:
    """The library's encoding with the parameters that the explorer gives it."""
    name = "kerple" if method == "kerple_power" else method
    if method == "kerple_power":
        options["kernel"] = "power"
    if method == "t5":
        options["causal"] = True
    if method == "fire":
        options |= {"hidden": 1, "threshold": TRAINED}
    encoding = posenc.create(name, dim=WIDTH, heads=HEADS, head_dim=WIDTH, **options)
    shares = torch.arange(1, HEADS + 1) / HEADS
    part = encoding.score
    with torch.no_grad():
        if isinstance(part, Kerple):
            part.set_kernel(size * shares, torch.full((HEADS,), shape))
        if isinstance(part, T5):
            first = torch.tensor([0, *part.boundaries])
            part.table.copy_(-size * shares.unsqueeze(1) * first.log1p())
        if isinstance(part, Fire):
            part.input.weight.fill_(1.0)
            part.input.bias.zero_()
            part.output.weight.copy_(-size * shares.unsqueeze(1))
            part.output.bias.zero_()
    return encoding


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


ROTATED = ["rope", "p_rope", "xpos"]
BIASES = ["alibi", "t5", "kerple", "kerple_power", "sandwich", "fire"]
OTHER_FREQUENCIES = ["interpolate", "ntk", "ntk_by_parts", "yarn", "llama3", "dynamic_ntk"]
OTHER_DISTANCES = ["rerope", "leaky_rerope", "self_extend", "string", "dual_chunk"]
CHANGES_OF_ROPE = [*OTHER_FREQUENCIES, "longrope", *OTHER_DISTANCES]


def test_the_menu_has_the_methods_of_these_tests(formulas: playwright.Page) -> None:
    methods = formulas.evaluate("Object.keys(Formulas.METHODS)")
    assert sorted(methods) == sorted([*ROTATED, *BIASES, "sinusoidal", "nope"])
    assert formulas.evaluate("Object.keys(Formulas.STRETCHES)") == CHANGES_OF_ROPE


@pytest.mark.parametrize("base", [10000, 300])
@pytest.mark.parametrize("method", [*ROTATED, "nope"])
def test_rotations(formulas: playwright.Page, method: str, base: float) -> None:
    options = {} if method == "nope" else {"base": base}
    state = SIZES | {"method": method, "base": base}
    close(explored(formulas, state), logits_of(created(method, **options))[0])


@pytest.mark.parametrize("head", [1, 3, 6])
@pytest.mark.parametrize("method", BIASES)
def test_biases(formulas: playwright.Page, method: str, head: int) -> None:
    state = SIZES | {"method": method, "head": head, "size": 1.7, "shape": 0.3, "base": 300}
    options = {"base": 300} if method == "sandwich" else {}
    expected = logits_of(created(method, 1.7, 0.3, **options))
    close(explored(formulas, state), expected[head - 1])


def test_every_head_of_alibi(formulas: playwright.Page) -> None:
    for heads in (1, 5, 8, 12):
        slopes = formulas.evaluate(f"Formulas.alibiSlopes({heads})")
        bias = posenc.create("alibi", heads=heads).score.bias(torch.tensor([-1.0]))
        close(-torch.tensor(slopes), bias.flatten())


def test_buckets_of_t5(formulas: playwright.Page) -> None:
    buckets = formulas.evaluate("Array.from({ length: 200 }, (_, n) => Formulas.t5Bucket(n))")
    t5 = posenc.create("t5", heads=1, causal=True).score
    assert buckets == t5.bucket(-torch.arange(200.0).unsqueeze(-1)).tolist()


def test_fire_with_given_units(formulas: playwright.Page) -> None:
    torch.manual_seed(0)
    fire = posenc.create("fire", heads=1, hidden=4, threshold=TRAINED).score
    torch.nn.init.normal_(fire.input.bias)
    torch.nn.init.zeros_(fire.output.bias)
    units = torch.stack([fire.input.weight[:, 0], fire.input.bias, fire.output.weight[0]], dim=1)
    rows = formulas.evaluate(
        """([units, threshold, length]) => { const of = Formulas.fire(units, threshold);
        return Array.from({ length }, (_, i) =>
          Array.from({ length }, (_, j) => j > i ? 0 : of(i, j))); }""",
        [units.tolist(), TRAINED, LENGTH],
    )
    expected = logits_of(Encoding(score=fire), heads=1)[0] - CONTENT
    close(torch.tensor(rows, dtype=torch.float64), expected.nan_to_num())


@pytest.mark.parametrize("logn", [False, True])
@pytest.mark.parametrize("stretch", CHANGES_OF_ROPE)
def test_stretches_of_rope(formulas: playwright.Page, stretch: str, logn: bool) -> None:
    factor = 1.5 if stretch == "string" else FACTOR
    options = {} if stretch in ("rerope", "dual_chunk") else {"factor": factor}
    options |= {} if stretch in ("interpolate", "ntk") else {"length": TRAINED}
    encoding = extend(created("rope", base=500.0), stretch, **options)
    if logn:
        encoding = extend(encoding, "log_n", length=TRAINED)
    state = {"method": "rope", "stretch": stretch, "factor": factor, "logn": logn, "base": 500}
    close(explored(formulas, SIZES | state), logits_of(encoding)[0])


def test_yarn_at_a_trained_length_that_its_ramp_was_made_for(formulas: playwright.Page) -> None:
    rope = created("rope")
    yarn = extend(rope, "yarn", factor=8, length=4096).query_key
    state = SIZES | {"method": "rope", "stretch": "yarn", "factor": 8, "trained": 4096}
    theta = formulas.evaluate("(state) => Formulas.model(state).theta", state)
    close(torch.tensor(theta), yarn.frequencies(like=torch.empty(0)))


def test_string_reaches_as_far_as_the_library_lets_it(formulas: playwright.Page) -> None:
    most = formulas.evaluate(f"Formulas.stringMost({TRAINED})")
    _ = extend(created("rope"), "string", factor=most, length=TRAINED)
    with pytest.raises(posenc.errors.ArgumentError):
        extend(created("rope"), "string", factor=most + 1 / TRAINED, length=TRAINED)


def test_logn_and_interpolation_of_alibi(formulas: playwright.Page) -> None:
    for name, options in (("log_n", {"length": TRAINED}), ("interpolate", {"factor": FACTOR})):
        state = {"logn": True} if name == "log_n" else {"stretch": name, **options}
        found = explored(formulas, SIZES | {"method": "alibi", "head": 2} | state)
        close(found, logits_of(extend(created("alibi"), name, **options))[1])


@pytest.mark.parametrize("stretch", ["", "interpolate"])
def test_products_of_sinusoidal_vectors(formulas: playwright.Page, stretch: str) -> None:
    encoding = created("sinusoidal")
    if stretch:
        encoding = extend(encoding, stretch, factor=FACTOR)
    layout = Layout.sequence(LENGTH)
    vectors = encoding.embed(torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64), layout)[0]
    products = CONTENT * vectors @ vectors.T / (WIDTH / 2)
    ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    state = SIZES | {"method": "sinusoidal", "stretch": stretch, "factor": FACTOR}
    close(explored(formulas, state), products.masked_fill(ahead, torch.nan))


def test_offered_stretches_are_those_that_fit(formulas: playwright.Page) -> None:
    for method in (*ROTATED, *BIASES, "sinusoidal", "nope"):
        fitting = applicable(created(method))
        for stretch in formulas.evaluate(f"Formulas.stretchesOf('{method}')"):
            assert stretch in fitting, (method, stretch)


DRAWN = "#decay svg"
VALUES = "(all) => all.map((e) => e.value)"


@pytest.fixture(scope="module")
def tab(browser: playwright.Browser) -> Visit:
    """A tab in which each test opens the explorer anew."""
    return Visit(browser, PAGE, DRAWN)


def set_slider(page: playwright.Page, name: str, value: int) -> None:
    page.locator(f"#{name}").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value
    )


def test_every_method_and_stretch_draws_without_network_or_errors(tab: Visit) -> None:
    page = tab.open(PAGE, DRAWN)
    for method in page.locator("#method option").evaluate_all(VALUES):
        page.select_option("#method", method)
        page.wait_for_timeout(50)
        for stretch in page.locator("#stretch option").evaluate_all(VALUES):
            if stretch:
                page.select_option("#stretch", stretch)
                page.wait_for_timeout(60)
            drawn = page.locator("#decay path").first.get_attribute("d")
            assert "NaN" not in drawn, (method, stretch)
            assert len(drawn) > 1000, (method, stretch)
    assert tab.troubles == []
    asked = {url.rsplit("/", 1)[0] for url in tab.requests if not url.startswith("data:")}
    assert asked == {FOLDER.as_uri()}


def test_the_curve_shows_the_logits_of_the_library(tab: Visit) -> None:
    """The live text gives them in words."""
    state = "#stretch=rerope&base=1000&trained=64&length=256&distance=200&width=16"
    page = tab.open(PAGE, DRAWN, state=state)
    page.wait_for_timeout(500)
    rope = extend(posenc.create("rope", head_dim=16, base=1000.0), "rerope", length=64).score
    x = torch.full((1, 1, 1, 16), math.sqrt(CONTENT) / 2)
    at = (Layout.at(torch.tensor([position])) for position in (255.0, 55.0))
    logit = rope(x, x, Grid(*at, causal=True), scale=0.25).item()
    text = page.locator("#reading").inner_text()
    assert f"at distance 200 the logit is {logit:.3g}," in text
    assert "rotated by a distance of 32" in text
    assert "beyond the trained length" in text


def test_sliders_change_the_charts_and_the_address(tab: Visit) -> None:
    page = tab.open(PAGE, DRAWN)
    before = page.locator("#decay path").first.get_attribute("d")
    set_slider(page, "base", 0)
    page.wait_for_timeout(100)
    assert page.locator("#decay path").first.get_attribute("d") != before
    assert "base=10" in page.url
    page.locator("#reset").click()
    page.wait_for_timeout(100)
    assert page.locator("#decay path").first.get_attribute("d") == before


def test_an_address_with_nonsense_is_mended(tab: Visit) -> None:
    state = "#method=none&stretch=x&length=999999&distance=-5&head=99&base=abc&trained=1e9"
    page = tab.open(PAGE, DRAWN)
    page.evaluate("(hash) => { location.hash = hash; }", state)
    page.wait_for_timeout(100)
    assert page.locator("#method").input_value() == "rope"
    assert page.locator("#row-length output").inner_text() == "8192 tokens"
    assert page.locator("#row-distance output").inner_text() == "0 tokens"
    assert tab.troubles == []


def test_links_to_views_set_what_they_say(tab: Visit) -> None:
    links = re.findall(r'href="sliders.html\?([^"]+)"', (DOCS / "explorer/index.md").read_text())
    assert len(links) > 5
    for link in map(unescape, links):
        page = tab.open(PAGE, DRAWN, state=f"?{link}")
        for setting in link.split("&"):
            name, _, value = setting.partition("=")
            control = page.locator(f"#{name}")
            if control.get_attribute("type") == "checkbox":
                assert control.is_checked() == (value == "true"), link
            elif control.get_attribute("type") == "range":
                assert control.get_attribute("aria-valuetext").split()[0] == value, link
            else:
                assert control.input_value() == value, link


def test_keyboard_alone(tab: Visit) -> None:
    page = tab.open(PAGE, DRAWN)
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    wanted = ["method", "stretch", "width", "base", "trained", "length", "distance", "content"]
    wanted += ["logn", "reset", "copy", "map"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted
    page.locator("#distance").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#row-distance output").inner_text() == "129 tokens"
    page.locator("#map").focus()
    page.keyboard.press("ArrowUp")
    assert "Query 2039, key 0, distance 2039" in page.locator("#cell").inner_text()
    page.keyboard.press("ArrowRight")
    assert "key 8, distance 2031" in page.locator("#cell").inner_text()


def test_screen_readers_get_names_values_and_changes(tab: Visit) -> None:
    page = tab.open(PAGE, DRAWN, state="#method=alibi")
    for control in page.locator("main input, main select").all():
        name = control.get_attribute("id")
        assert page.locator(f"label[for='{name}']").count() == 1, name
    assert page.locator("#length").get_attribute("aria-valuetext") == "2048 tokens"
    for chart in ("decay", "map", "spectrum"):
        assert len(page.locator(f"#{chart}").get_attribute("aria-label")) > 40, chart
    page.wait_for_timeout(400)
    before = page.locator("#reading[aria-live]").inner_text()
    set_slider(page, "distance", 300)
    page.wait_for_timeout(400)
    assert page.locator("#reading").inner_text() != before
    assert "distance 300" in page.locator("#reading").inner_text()
    levels = page.locator("h1, h2").evaluate_all("(all) => all.map((e) => e.tagName)")
    assert levels == ["H1", "H2", "H2", "H2"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legible_in_both_schemes(tab: Visit, scheme: str) -> None:
    page = tab.open(PAGE, DRAWN, state="#stretch=ntk", scheme=scheme)
    for selector in ("p", "label", "output", "a:not(.skip)", ".chart text", "button"):
        assert min(page.evaluate(CONTRAST, selector)) >= 4.5, selector


@pytest.mark.parametrize(
    ("width", "state"),
    in_turn(1, [320, 390, 768, 1280], ["#method=kerple&heads=32", "#stretch=yarn", "#method=fire"]),
)
def test_fits_the_page(tab: Visit, width: int, state: str) -> None:
    page = tab.open(PAGE, DRAWN, state=state, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for chart in ("#decay svg", "#map", "#spectrum svg"):
        box = page.locator(chart).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width + 1
