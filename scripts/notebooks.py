"""Write notebooks/ from pages of the site: their words and blocks, for Jupyter and Colab.

``make docs`` runs it. A page's blocks run in the tests, so the cells of its notebook do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PAGES = ("start/tour", "guides/own-model", "guides/own-attention", "guides/stretch")
INSTALL = '%pip install -q "posenc[cli,transformers]"'
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebooks() -> dict[Path, str]:
    """Every notebook by its path."""
    return {
        FOLDER / f"{page.rpartition('/')[2]}.ipynb": notebook(
            (ROOT / f"docs/{page}.md").read_text()
        )
        for page in PAGES
    }


def notebook(page: str) -> str:
    """A page as a notebook; its first code cell installs posenc."""
    parts = BLOCK.split(page)
    cells = [words(parts[0]), code(INSTALL)]
    for kind, block, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        cells += [code(block if kind == "python" else unprompted(block)), words(text)]
    kept = [cell | {"id": f"cell-{i}"} for i, cell in enumerate(cells) if cell["source"]]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    whole = {"cells": kept, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def words(text: str) -> dict[str, Any]:
    """A cell of Markdown, without the roles of Sphinx."""
    plain = re.sub(r"\{term\}`([^`<]+?)(?: <[^`]*>)?`", r"\1", text.strip())
    plain = re.sub(r"\[([^\]]+)\]\((?!http)[^)]+\)", r"\1", plain)
    return {"cell_type": "markdown", "metadata": {}, "source": plain}


def code(text: str) -> dict[str, Any]:
    """A cell of code that has not run."""
    empty = {"execution_count": None, "outputs": []}
    return {"cell_type": "code", "metadata": {}, "source": text.strip(), **empty}


def unprompted(block: str) -> str:
    """The statements of a session, without what they print; those that raise as comments."""
    lines = []
    for example in re.findall(r"((?:^(?:>>>|\.\.\.).*\n)+)((?:(?!>>>).*\n)*)", block, re.MULTILINE):
        statement = re.sub(r"^(>>>|\.\.\.) ?", "", example[0], flags=re.MULTILINE)
        raises = example[1].startswith("Traceback")
        lines.append(
            re.sub("^", "# ", statement.rstrip(), flags=re.MULTILINE) + "\n"
            if raises
            else statement
        )
    return "".join(lines)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in notebooks().items():
        path.write_text(text)
        print(f"Written: {path.relative_to(ROOT)}")
