"""Measurements of models that take less time than those of a user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from posenc.lab.evaluation.suites import encoders, next_token

WINDOWS = 32
"""Of text for one number, where users have up to 256."""


@pytest.fixture(scope="module", autouse=True)
def few_windows() -> Iterator[None]:
    """Numbers are means over few windows: tests ask what is made of them, not how precise they are.

    Nor are passes timed until their time is precise. Of modules, as some measure once for all their
    tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        for suite in (encoders, next_token):
            patch.setattr(suite, "MOST", WINDOWS)
        patch.setattr(next_token, "PRECISION", 1.0)
        yield
