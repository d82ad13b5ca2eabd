"""Reports by name and width, each opened once for all tests that only look at it."""

from __future__ import annotations

import pytest

DRAWN = "html[data-drawn]"
"""Selector of a report whose charts are drawn."""


def views(*names: str, widths: tuple[int, ...] = (1280,)) -> pytest.MarkDecorator:
    """Call a test with each of some reports at each of some widths; each is loaded once for all."""
    values = [(name, width) for name in names for width in widths]
    ids = [f"{name}-{width}" for name, width in values]
    return pytest.mark.parametrize("view", values, ids=ids, indirect=True, scope="module")
