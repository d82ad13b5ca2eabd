"""Imports go one way, and ``import posenc`` loads nothing optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import posenc

PACKAGE = Path(posenc.__file__).parent

FOUNDATION = {"errors", "layout", "encoding", "entry"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "layout": {"errors"},
    "encoding": {"errors", "layout"},
    "entry": {"errors", "encoding"},
    "storage": {"errors"},
    "encodings": FOUNDATION,
    "attention": FOUNDATION - {"entry"},
    "registry": FOUNDATION | {"encodings"},
    "testing": FOUNDATION | {"registry", "attention", "encodings"},
    "extension": FOUNDATION | {"registry", "attention", "encodings"},
    "models": FOUNDATION | {"registry", "attention", "encodings", "extension", "storage"},
    "integrations": FOUNDATION
    | {"registry", "attention", "encodings", "extension", "models", "storage"},
    "lab": FOUNDATION
    | {"registry", "attention", "encodings", "extension", "models", "storage"},
    "cli": FOUNDATION
    | {"registry", "attention", "encodings", "extension", "models", "integrations", "lab"}
    | {"storage"},
}


def imported_modules(file: Path) -> set[str]:
    """Every module of posenc that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "posenc"}


FILES = sorted(
    file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or file.stem != "__init__"
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path) -> None:
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported_modules(file):
        _, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if (PACKAGE / target).exists() or (PACKAGE / f"{target}.py").exists():
            assert target == own or target in MAY_IMPORT[own], f"{own} must not import {target}"


def test_backends_never_import_one_another() -> None:
    folder = PACKAGE / "attention" / "backends"
    for file in folder.rglob("*.py"):
        own = file.relative_to(folder).parts[0].removesuffix(".py")
        for name in imported_modules(file):
            parts = name.split(".")
            if parts[1:3] == ["attention", "backends"] and len(parts) > 3:
                assert parts[3] in {own, "base"}, f"{file.name} imports {name}"


OPTIONAL = [
    "transformers",
    "lightning_fabric",
    "altair",
    "pandas",
    "typer",
    "rich",
    "jinja2",
    "torchdiffeq",
    "scipy",
    "posenc.lab",
    "posenc.cli",
    "posenc.models",
    "posenc.testing",
]


def test_import_loads_nothing_optional() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import posenc;"
        f"print([m for m in {OPTIONAL!r} if m in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
