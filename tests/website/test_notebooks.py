"""Notebooks are current with the pages that they are made of, and their cells run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.website.pages import ROOT
from tests.website.test_blocks import offline

__all__ = ["offline"]  # a fixture

MADE = sorted((ROOT / "notebooks").glob("*.ipynb"))


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts/notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebooks_are_current() -> None:
    made: dict[Path, str] = script().notebooks()
    assert sorted(made) == MADE
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name} is not current. Remedy: make docs"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_cells_run(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("%pip install")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, source in enumerate(code[1:]):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
