"""Write the pages of docs/ that follow from the code, and the pictures of encodings.

``python -m scripts.docs`` (``make docs``). What it is made from is remembered in ``docs/.made``, so
that nothing is written again while that stays. With ``--check`` nothing is written; it fails where
a committed page is not current.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts.docs import pages, pictures

from posenc.registry import ENCODINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STAMP = DOCS / ".made"
SOURCES = (
    *("src/posenc/**/*.py", "scripts/docs/*", "benchmarks/results/**/*"),
    *("docs/about/bugs.md", "src/posenc/lab/used_by.toml"),
)
DRAWN = (
    "src/posenc/encodings/**/*.py",
    "src/posenc/lab/visualization/*.py",
    "src/posenc/lab/reporting/palette.py",
    "scripts/docs/pictures.py",
    "docs/_ext/charts.py",
)
"""Of pictures; the gallery's are drawn anew after a change, which Sphinx-Gallery does not see."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if not current")
    if parser.parse_args().check:
        stale = [name for name, text in pages.committed().items() if not current(name, text)]
        for name in stale:
            print(f"docs/{name} is not current. Remedy: make docs", file=sys.stderr)
        sys.exit(bool(stale))
    write_pages(pages.committed())
    write()


def write_pages(made: Mapping[str, str]) -> None:
    """Write those that are not current."""
    for name, text in made.items():
        if not current(name, text):
            (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / name).write_text(text)


def write() -> None:
    """Write what is not current of all that is not committed, as each build of the site does.

    It would otherwise hide stale pages from the test that asks for them.
    """
    known = STAMP.read_text().split() if STAMP.exists() else ["", ""]
    written, drawn = digest(SOURCES), digest(DRAWN)
    if known == [written, drawn]:
        return
    made, committed = pages.pages(), pages.committed()
    write_pages({name: text for name, text in made.items() if name not in committed})
    for folder in ("methods", "extensions", "reference/api"):
        for path in (DOCS / folder).glob("*.md"):
            if f"{folder}/{path.name}" not in made and path.name != "which.md":
                path.unlink()
    if known[1:] != [drawn]:
        shutil.rmtree(DOCS / "gallery", ignore_errors=True)
    for name in ENCODINGS:
        path = DOCS / "methods" / "pictures" / f"{name}.html"
        if known[1:] != [drawn] or not path.exists():
            pictures.save(name, path)
    STAMP.write_text(f"{written} {drawn}")
    print(f"docs: {len(made)} pages")


def current(name: str, text: str) -> bool:
    """True if a page says this."""
    return (DOCS / name).exists() and (DOCS / name).read_text() == text


def digest(patterns: tuple[str, ...]) -> str:
    """Digest of all files of some patterns."""
    total = hashlib.sha256()
    for path in sorted(p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
