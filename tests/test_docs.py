"""What the documents say is there, is there."""

from __future__ import annotations

import re
from pathlib import Path

from posenc.registry import ENCODINGS
from posenc.testing import LAWS

ROOT = Path(__file__).parent.parent
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_every_named_test_exists() -> None:
    page = (ROOT / "docs" / "bugs-others-had.md").read_text()
    names = re.findall(r"\| `(\w+)`", page)
    assert len(names) > 15
    for name in names:
        assert f"def {name}(" in TESTS or name in LAWS, name


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_names_every_encoding() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ENCODINGS:
        assert f"`{name}`" in readme, name


def test_the_readmes_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    for example in code:
        exec(compile(example, "README.md", "exec"), {"print": lambda *_: None})
