"""Skips of what an installed version of another library does not have, or does wrong."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

TYPES = {"inkling2_text": "5.23"}
"""Model types of tests, by the first version of transformers that has them."""


def fault_before(library: str, fixed: str, reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test with versions of a library that have a fault."""
    installed = version(library)
    return pytest.mark.skipif(
        Version(installed) < Version(fixed), reason=f"{library} {installed}: {reason}"
    )


def of_type(kind: str) -> list[pytest.MarkDecorator]:
    """Marks of a test of a model type: it is skipped with a transformers that does not have it."""
    if kind not in TYPES:
        return []
    return [fault_before("transformers", TYPES[kind], f"no model type {kind} before {TYPES[kind]}")]
