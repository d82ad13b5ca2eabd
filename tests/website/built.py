"""The site as ``make docs`` builds it, built once for all processes of the tests."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from tests.website.pages import ROOT

BUILD = ROOT / "build"
SITE = BUILD / "docs"

OTHERS = ("_modules", "_static", "genindex", "py-modindex", "search")
"""Beginnings of pages that Sphinx makes for its own use."""


@cache
def site() -> Path:
    """Build what changed, strictly; the folder of pages."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d"]
        command += [str(BUILD / "doctrees"), str(ROOT / "docs"), str(SITE)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        if done.returncode:  # what it read stays read, and would not warn again
            shutil.rmtree(BUILD / "doctrees", ignore_errors=True)
        assert done.returncode == 0, done.stderr
        for page in SITE.rglob("*.html"):  # of sources that are gone
            name = page.relative_to(SITE)
            source = ROOT / "docs" / name
            made_of = [source.with_suffix(end) for end in (".md", ".rst", ".ipynb")]
            made_of.append(ROOT / "docs/_extra" / name)
            if not name.as_posix().startswith(OTHERS) and not any(map(Path.exists, made_of)):
                page.unlink()
    return SITE


class Page(HTMLParser):
    """Facts of a page that the tests ask for.

    Attributes:
        links: (text, address) of every link, in order.
        loaded: addresses of what the page loads: scripts, styles, pictures.
        anchors: ids.
        headings: levels, in order.
        pictures: alternative texts; None where there is none.
        text: all words, with single spaces.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.headings: list[int] = []
        self.pictures: list[str | None] = []
        self._words: list[str] = []
        self._open: tuple[str, int] | None = None
        self._hidden = 0
        self.feed(path.read_text())
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values["id"]} if values.get("id") else set()
        if tag == "a" and values.get("href"):
            self._open = (str(values["href"]), len(self._words))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img":
            self.pictures.append(values.get("alt"))
        if tag in ("img", "script", "iframe") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(str(values["href"]))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open:
            address, begin = self._open
            text = " ".join("".join(self._words[begin:]).split())
            self.links.append((text, address))
            self._open = None
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)

    def target(self, address: str) -> Path | None:
        """The file that a relative address leads to; None for other addresses."""
        if re.match(r"[a-z]+:", address):
            return None
        file = address.partition("#")[0].partition("?")[0]
        return (self.path.parent / file).resolve() if file else self.path


@cache
def pages() -> dict[str, Page]:
    """Every page by its path in the site, but those that Sphinx makes for its own use."""
    folder = site()
    made = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.html")}
    return {name: Page(path) for name, path in made.items() if not name.startswith(OTHERS)}
