"""A share of the fuzz of the Triton kernels, interpreted; run by ``test_triton.py``."""

from __future__ import annotations

import pytest

from tests.testing.attention_fuzz import fuzz, interpreted

PARTS, COUNT = 4, 20


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int) -> None:
    served = [names for _, names in fuzz(COUNT, first=part * COUNT, scope=interpreted())]
    assert sum(map(bool, served)) > COUNT // 4
