"""Docstrings are sentences, and their examples run and print what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import posenc

MODULES = [module.name for module in pkgutil.walk_packages(posenc.__path__, "posenc.")]

NEEDS = {"posenc.lab.lm_eval": "lm_eval"}
"""Packages that the tests can do without, by module."""


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


WITHOUT_SUBJECT = re.compile(r"(?:Of|Those|The same|As|What|Which|Where|Whether|That)\b")


def test_docstrings_begin_with_what_they_are_about() -> None:
    """A reader of one of them has not read the one before it."""
    riddles = []
    for file in Path(posenc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                value = getattr(statement, "value", None)
                if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                    text = str(value.value).strip()
                    riddles += [(file.name, text)] if WITHOUT_SUBJECT.match(text) else []
    assert riddles == []
