"""The error that an implementation is allowed."""

from __future__ import annotations

import math

import pytest
import torch

from posenc.testing import LawBroken
from tests.testing.tolerances import distance, tolerance

EXACT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def test_distance_is_the_largest_difference() -> None:
    assert distance(torch.tensor([1.0, 2.5, 3.25]), EXACT) == 0.5
    assert distance(torch.empty(0), torch.empty(0)) == 0.0
    assert distance(torch.tensor([-math.inf, 1.5]), torch.tensor([-math.inf, 1.0])) == 0.5
    assert distance(torch.tensor([-math.inf]), torch.tensor([1.0])) == math.inf
    assert distance(torch.tensor([1.0, math.nan, 3.0]), EXACT) == math.inf
    with pytest.raises(LawBroken, match=r"expected shape \[3\], got \[2\]"):
        distance(torch.zeros(2), EXACT)


def test_tolerance_follows_the_definitions_own_error() -> None:
    rough = EXACT.float() + torch.tensor([0.0, 0.01, 0.0])
    assert tolerance(rough, EXACT) == pytest.approx(0.04, rel=1e-4)
    epsilon = torch.finfo(torch.float32).eps
    assert tolerance(EXACT.float(), EXACT, factor=2) == pytest.approx(2 * 3 * epsilon)
