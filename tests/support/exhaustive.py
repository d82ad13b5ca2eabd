"""Parameters of which only some run in the suite, and all with ``make test-exhaustive``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def kept_in_suite(names: Iterable[str], kept: Collection[str]) -> list[object]:
    """``names``, of which those not in ``kept`` are marked exhaustive."""
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]
