"""The site as ``make docs`` builds it, built once for all processes of the tests."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html import unescape
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
        given = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=given)
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


def words(markup: str) -> str:
    """Words between tags, with single spaces."""
    return " ".join(unescape(re.sub(r"<!--.*?-->|<[^>]*>", "", markup, flags=re.DOTALL)).split())


class Page:
    """Facts of a page that the tests ask for.

    Attributes:
        links: (text, address) of every link, in order.
        loaded: addresses of what the page loads: scripts, styles, pictures.
        anchors: ids.
        headings: levels, in order.
        pictures: tags of pictures without an alternative text.
        text: all words, with single spaces.
    """

    def __init__(self, path: Path) -> None:
        self.path, markup = path, path.read_text()
        shown = re.sub(r"<(script|style)\b.*?</\1>", "", markup, flags=re.DOTALL)
        links = re.findall(r'<a\b[^>]*?\bhref="([^"]+)"[^>]*>(.*?)</a>', shown, re.DOTALL)
        self.links = [(words(text), unescape(address)) for address, text in links]
        self.loaded = re.findall(r'<(?:img|script|iframe)\b[^>]*\bsrc="([^"]+)"', markup)
        styles = re.findall(r'<link\b[^>]*\brel="(?:stylesheet|preload|icon)"[^>]*>', markup)
        self.loaded += re.findall(r'\bhref="([^"]+)"', "".join(styles))
        self.anchors = set(re.findall(r"""<[a-z][^>]*?\sid=["']?([^"'\s>]+)""", markup))
        self.headings = [int(level) for level in re.findall(r"<h([1-6])\b", shown)]
        self.pictures = [tag for tag in re.findall(r"<img\b[^>]*>", shown) if " alt=" not in tag]
        self.text = words(shown)

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
