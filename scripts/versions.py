"""Name the published versions of the site to one another.

``python scripts/versions.py SITE``: SITE has a folder a version, such as ``dev`` and ``v0.1.0``.
Each gets the list of all, which its pages show in their header, and SITE a page that leads to the
newest release. Without a network: the list is a script in each folder, so that pages opened as
files have it too.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

LIST = Path("_static", "versions.js")
RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def published(site: Path) -> list[str]:
    """Names of the folders of versions: releases, the newest first, then others."""
    names = [path.name for path in sorted(site.iterdir()) if (path / LIST).exists()]
    return sorted(names, key=_order, reverse=True)


def _order(name: str) -> tuple[int, ...]:
    """Numbers of a release; none of another version."""
    match = RELEASE.fullmatch(name)
    return tuple(map(int, match.groups())) if match else ()


def write(site: Path) -> None:
    """Write the lists, and the page at the root."""
    names = published(site)
    if not names:
        raise SystemExit(
            f"{site} has no folder with {LIST}. Remedy: make site, then copy build/docs"
        )
    for name in names:
        path = site / name / LIST
        head = path.read_text().partition("const versions")[0]
        path.write_text(f"{head}const versions = {json.dumps(names)};\n")
    (site / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/">'
        f'<title>posenc</title><a href="{names[0]}/index.html">posenc {names[0]}</a>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    write(parser.parse_args().site)
