"""Skips of what an installed version of another library does not have, or does wrong."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

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


def checkpoint_activations(model: Any, *, reentrant: bool) -> None:
    """Have a model compute activations again in backward passes, by the name of before 5.23 too."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": reentrant})


def needs_model_type(name: str) -> pytest.MarkDecorator:
    """A mark that skips a test where the installed transformers lacks a model type."""
    lacking = f"transformers {transformers.__version__} has no model type {name!r}"
    return pytest.mark.skipif(name not in CONFIG_MAPPING, reason=lacking)


def require_interpreter() -> None:
    """Skip a test that runs Triton's kernels interpreted where these versions cannot."""
    triton, numpy = (Version(version(name)) for name in ("triton", "numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        pytest.skip(f"triton {triton}: its interpreter takes numbers out of arrays as numpy < 2.4")
