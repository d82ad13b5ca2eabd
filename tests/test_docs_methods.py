"""The pages made from the registry are current, and every method has one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from posenc.registry import ENCODINGS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_maker", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(maker: ModuleType) -> dict[str, str]:
    pages: dict[str, str] = maker.pages()
    return pages


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_page_of_a_method_is_current(name: str, made: dict[str, str]) -> None:
    path = DOCS / "methods" / f"{name}.md"
    assert path.exists(), f"{name} has no page. Remedy: make docs"
    assert path.read_text() == made[f"methods/{name}.md"], "Remedy: make docs"


def test_the_table_is_current(made: dict[str, str]) -> None:
    assert (DOCS / "methods" / "index.md").read_text() == made["methods/index.md"], (
        "Remedy: make docs"
    )


def test_no_page_is_left_of_a_method_that_is_gone() -> None:
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")}
    assert pages == {"index", *ENCODINGS}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_page_tells_what_the_entry_knows(name: str, made: dict[str, str]) -> None:
    entry, page = ENCODINGS[name], made[f"methods/{name}.md"]
    assert entry.summary in page
    assert entry.claims.extrapolates.replace("|", "\\|") in page
    assert entry.citation is not None
    assert entry.citation.url in page
    for option in entry.options():
        assert re.search(rf"^\| `{option}` \| `.+` \| .+ \|$", page, re.MULTILINE), option
    assert ">>>" in page


def test_rows_have_as_many_cells_as_their_heads(made: dict[str, str]) -> None:
    for name, page in made.items():
        for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1, name


def test_links_lead_somewhere(made: dict[str, str]) -> None:
    for name, page in made.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page):
            assert (DOCS / name).parent.joinpath(target).resolve().is_file(), target
