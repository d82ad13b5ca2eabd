"""Reports by name and width, each opened once for all tests that only look at it."""

from __future__ import annotations

import pytest

from tests.support.exhaustive import in_turn

DRAWN = "html[data-drawn]"
"""Selector of a report whose charts are drawn."""


def views(
    *names: str, widths: tuple[int, ...] = (1280,), rounds: int | None = None
) -> pytest.MarkDecorator:
    """Call a test with each of some reports at each of some widths; each is loaded once for all.

    Args:
        names: of reports.
        widths: of windows, in pixels.
        rounds: in which they take turns; all meet if None.
    """
    cases = in_turn(rounds or len(widths), names, widths)
    found = [pytest.param(case.values, id=case.id, marks=case.marks) for case in cases]
    return pytest.mark.parametrize("view", found, indirect=True, scope="module")
