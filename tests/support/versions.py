"""Skips of what an installed version of another library does not have, or does wrong."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING


def fault_before(library: str, fixed: str, reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test with versions of a library that have a fault."""
    installed = version(library)
    return pytest.mark.skipif(
        Version(installed) < Version(fixed), reason=f"{library} {installed}: {reason}"
    )


def needs_model_type(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test where the installed transformers lacks a model type."""
    lacking = f"transformers {transformers.__version__} has no model type {name!r}"
    return pytest.mark.skipif(name not in CONFIG_MAPPING, reason=lacking)
