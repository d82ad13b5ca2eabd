"""Products of axes, of which the suite has those that take turns."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from tests.support.exhaustive import in_turn


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (6, 3), (10, 14), (10, 2, 2), (3, 5, 5)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_every_value_has_its_turns(sizes: tuple[int, ...], rounds: int) -> None:
    axes = [[f"{axis}.{n}" for n in range(size)] for axis, size in enumerate(sizes)]
    cases: list[Any] = in_turn(rounds, *axes)
    assert [case.values for case in cases] == list(product(*axes))
    kept = [case.values for case in cases if not case.marks]
    assert {mark.name for case in cases for mark in case.marks} <= {"exhaustive"}
    met = Counter(value for values in kept for value in values)
    least = min(rounds, *sizes, len(cases) // max(sizes))
    for axis in axes:
        for value in axis:
            assert met[value] >= least
    assert len(kept) <= rounds * max(sizes)


def test_values_may_be_named_or_of_several_parameters() -> None:
    cases: list[Any] = in_turn(1, {"one": [1], "two": [2]}, [("a", 5), ("b", 6)])
    assert [case.id for case in cases] == ["one-a 5", "one-b 6", "two-a 5", "two-b 6"]
    assert cases[1].values == ([1], "b", 6)
    assert [bool(case.marks) for case in cases] == [False, True, True, False]
