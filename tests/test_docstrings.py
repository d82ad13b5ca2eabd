"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import posenc

PROGRAMS = tuple(
    f"posenc.{room}"
    for room in ("cli", "training", "experiments", "evaluation", "bench", "visualization")
)
MODULES = [
    module.name
    for module in pkgutil.walk_packages(posenc.__path__, "posenc.")
    if not module.name.startswith(PROGRAMS)
]

NEEDS = {"posenc.lab.lm_eval": "lm_eval"}
"""Packages that the tests can do without, by module."""


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
