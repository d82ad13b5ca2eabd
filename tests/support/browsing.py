"""A headless Chromium, and a page in it with everything that goes wrong or out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
HEIGHTS = {768: 1024, 390: 844}
"""Of windows of a tablet's and a phone's width; others are 800 pixels high."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


class Visit:
    """A page, and everything that went wrong or out since it was opened last."""

    def __init__(
        self,
        browser: playwright.Browser,
        path: Path,
        ready: str = "main",
        *,
        scheme: str = "light",
        width: int = 1280,
        **options: object,
    ) -> None:
        self.page = browser.new_page(**options)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.open(path, ready, scheme=scheme, width=width)

    def open(
        self,
        path: Path,
        ready: str = "main",
        *,
        scheme: str = "light",
        width: int = 1280,
        state: str = "",
    ) -> playwright.Page:
        """Load a file anew in this tab, which takes half the time of a new one.

        Args:
            path: of the file.
            ready: selector of what is there once it is drawn.
            scheme: of colours, on a screen.
            width: pixels of the window.
            state: query or fragment of the address.
        """
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.emulate_media(media="screen", color_scheme=scheme)
        self.page.set_viewport_size({"width": width, "height": HEIGHTS.get(width, 800)})
        if state.startswith("#"):
            self.page.goto("about:blank")  # another fragment of the same file would not load it
        self.page.goto(path.as_uri() + state)
        self.page.wait_for_selector(ready)
        return self.page

    def _heard(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)


LIGHTNESS = """const light = (c) => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => {
      v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = light(getComputedStyle(document.documentElement).backgroundColor);
  const ratio = (c) => (Math.max(light(c), paper) + 0.05) / (Math.min(light(c), paper) + 0.05);"""

CONTRAST = f"""(selector) => {{ {LIGHTNESS}
  return [...document.querySelectorAll(selector)].map((e) => {{
    const style = getComputedStyle(e);
    return ratio(e instanceof SVGElement ? style.fill : style.color); }}); }}"""
"""Contrasts of words with the paper."""

STROKES = f"""(selector) => {{ {LIGHTNESS}
  return [...document.querySelectorAll(selector)].map((e) => getComputedStyle(e).stroke)
    .filter((c) => c.startsWith("rgb(")).map(ratio); }}"""
"""Contrasts of lines with the paper."""

CUT = """(selector) => [...document.querySelectorAll(selector)].filter((text) => {
    const own = text.getBoundingClientRect();
    const page = document.documentElement.clientWidth;
    if (!text.textContent.trim() || !own.width) return false;
    let beyond = Math.max(-own.left, own.right - page);
    for (let e = text.parentElement; e; e = e.parentElement) {
      const clips = !(e instanceof SVGElement) || e.tagName === "svg";
      if (!clips || getComputedStyle(e).overflow === "visible") continue;
      const box = e.getBoundingClientRect();
      beyond = Math.max(beyond, box.left - own.left, own.right - box.right);
      beyond = Math.max(beyond, box.top - own.top, own.bottom - box.bottom); }
    return beyond > 0.5;
  }).map((text) => text.textContent)"""
"""Texts of pictures that reach out of what clips them, or out of the page."""

WIDE_FONT = "svg text { font-family: Arial, 'Liberation Sans' !important; letter-spacing: .07em; }"
"""Labels as wide as those of DejaVu Sans or Verdana, whatever fonts there are."""
