"""Means with their 95 % intervals."""

from __future__ import annotations

import pytest

from posenc.lab.reporting.numbers import estimate, paired_difference


def test_interval_by_hand() -> None:
    # Student's t at 97.5 % with 2 degrees of freedom is 4.302653; sd 1, n 3.
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert estimate([]) is None
    single = estimate([5.0])
    assert single is not None
    assert single.half_width is None
    assert not single.sure


def test_pairs_cancel_what_seeds_share() -> None:
    a, b = {0: 1.0, 1: 5.0, 2: 9.0}, {0: 0.9, 1: 4.91, 2: 8.89, 7: 0.0}
    found = paired_difference(a, b)
    assert found is not None
    assert found.n == 3
    assert found.mean == pytest.approx(0.1, abs=1e-9)
    assert found.sure
