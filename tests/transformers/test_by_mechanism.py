"""Code that serves RoPE, windows, sinks and caps names no family of models."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import posenc.transformers as package

FOLDER = Path(package.__file__).parent
PATHS = sorted([*FOLDER.glob("stretching/*.py"), *FOLDER.glob("acceleration/*.py")])
WORDS = {"beam", "encoder_decoder"}
"""Model types that are also words of generation and of its caches."""

NAMES = {name.replace("-", "_") for name in CONFIG_MAPPING_NAMES} - WORDS


def spelled(tree: ast.AST) -> list[str]:
    """Identifiers, attributes, imports and strings of code, without docstrings."""
    documented = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [] if node in documented else [node.value]
        for field in ("id", "attr", "name", "module", "arg"):
            value = getattr(node, field, None)
            found += [value] if isinstance(value, str) else []
    return found


def families(source: str) -> set[str]:
    """Model types that code names, as words or at either end of an identifier."""
    words = {
        word.lower()
        for text in spelled(ast.parse(source))
        for word in re.findall(r"\w+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text))
    }
    return {name for name in NAMES if any(f"_{name}_" in f"_{word}_" for word in words)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_family_is_named(path: Path) -> None:
    assert families(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("if config.model_type == 'llama': pass", {"llama"}),
        ("class Qwen3Attention: pass", {"qwen3"}),
        ("from transformers.models.gpt_oss import x", {"gpt_oss"}),
        ('"""Of llama."""\nblooming = 1', set()),
    ],
)
def test_what_counts_as_naming(source: str, named: set[str]) -> None:
    assert families(source) == named
