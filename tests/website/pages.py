"""Sources of the site, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

NO_PAGES = {"gallery", "_ext"}
GENERATED = "<!-- made by `make docs` from the registry"
"""Beginning of pages whose code tests/test_docs_pages.py runs."""
SOURCES = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if not NO_PAGES & set(path.parts) and not path.read_text().startswith(GENERATED)
]
SOURCES.append(ROOT / "README.md")

CHINESE = DOCS / "zh"
TRANSLATED = [
    path
    for folder in ("start", "choose", "guides")
    for path in sorted((DOCS / folder).glob("*.md"))
]
"""English pages with a Chinese one, whose code is the same (test_chinese.py)."""

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    """A page's path from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """Language and text of each block of code, in order."""
    return [(kind, code) for _, kind, code in BLOCK.findall(text) if kind in languages]
