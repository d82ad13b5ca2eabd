"""Facts about model types that only some versions of transformers have."""

from __future__ import annotations

import pytest
import transformers
from transformers import CONFIG_MAPPING


def needs_model_type(name: str) -> pytest.MarkDecorator:
    """Skip a test where the installed transformers lacks a model type."""
    lacking = f"transformers {transformers.__version__} has no model type {name!r}"
    return pytest.mark.skipif(name not in CONFIG_MAPPING, reason=lacking)
