"""The error that an implementation is allowed."""

from __future__ import annotations

import math

import pytest
import torch

from posenc.testing import LawBroken
from tests.testing.tolerances import agree_as_well, agree_within, distance, tolerance

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


def test_worse_than_the_definition_is_refused() -> None:
    reference = EXACT.float() + 0.01
    agree_as_well("law", "it", EXACT.float() - 0.03, reference, EXACT)
    with pytest.raises(LawBroken, match=r"law: it in torch\.float32 is off by 0\.05 from float64"):
        agree_as_well("law", "it", EXACT.float() - 0.05, reference, EXACT)
    with pytest.raises(LawBroken, match="off by inf"):
        agree_as_well("law", "it", EXACT.float() * math.nan, reference, EXACT)


def test_bounds_give_way_to_the_definitions_own_error() -> None:
    hidden = torch.tensor([-math.inf, *EXACT.tolist()], dtype=torch.float64)
    asked: list[None] = []

    def definition() -> list[torch.Tensor]:
        asked.append(None)
        return [hidden.float() + 0.01]

    agree_within([0.01], [hidden.float() + 0.02], [hidden], definition)
    assert not asked
    agree_within([0.01], [hidden.float() + 0.035], [hidden], definition)
    assert asked
    with pytest.raises(LawBroken, match="result 0"):
        agree_within([0.01], [hidden.float() + 0.05], [hidden], definition)
    with pytest.raises(LawBroken, match="off by inf"):
        agree_within([0.01], [hidden.float() * math.nan], [hidden], definition)
