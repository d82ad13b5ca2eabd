"""LongRoPE's search: better than the formulas, the same when interrupted, never out of bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posenc import create
from posenc.errors import ArgumentError, CheckpointError
from posenc.extension import Found, NotApplicable, SearchSettings, extend, search_factors
from posenc.lab.evaluation.progress import StoredLosses

ROPE = create("rope", head_dim=16)
BEST = (1.0, 1.0, 1.2, 1.8, 2.5, 3.1, 3.9, 4.4)
SMALL = SearchSettings(population=8, mutations=4, crossovers=4, parents=6)


def bowl(factors: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(factors, BEST, strict=True))


def run(**options: Any) -> Found:
    chosen = {"factor": 4, "length": 256, "budget": 60, "plan": SMALL} | options
    return search_factors(ROPE, chosen.pop("loss", bowl), **chosen)


def test_it_beats_the_formulas_it_begins_from() -> None:
    found = run(budget=400, plan=SearchSettings())
    assert list(found.formulas) == ["interpolate", "ntk", "yarn"]
    assert found.best.loss < 0.3 * min(each.loss for each in found.formulas.values())
    assert bowl(found.best.factors) == found.best.loss


def test_it_begins_from_the_formulas() -> None:
    formulas = run().formulas
    assert formulas["interpolate"].factors == (4.0,) * 8
    for name in ("ntk", "yarn"):
        rope: Any = extend(ROPE, name, factor=4, length=256).query_key
        assert formulas[name].factors == pytest.approx(rope.divisors, abs=0.006)


def test_all_individuals_are_in_order_and_in_bounds() -> None:
    seen: list[tuple[float, ...]] = []

    def loss(factors: tuple[float, ...]) -> float:
        seen.append(factors)
        return bowl(factors)

    run(loss=loss, budget=150)
    assert len(seen) == 150
    assert len(set(seen)) > 145
    for each in seen:
        assert list(each) == sorted(each)
        assert each[0] >= 1
        assert each[-1] <= 5
        assert all(abs(100 * f - round(100 * f)) < 1e-6 for f in each)


@pytest.mark.parametrize("after", [1, 7, 21])
def test_a_search_with_stored_losses_goes_on(tmp_path: Path, after: int) -> None:
    state, measured = tmp_path / "deeper" / "search.json", []
    first = run(loss=StoredLosses(state, bowl, factor=4), budget=after)
    assert run(loss=StoredLosses(state, bowl, factor=4), budget=1).tried == 1

    def loss(factors: tuple[float, ...]) -> float:
        measured.append(factors)
        return bowl(factors)

    again = run(loss=StoredLosses(state, loss, factor=4))
    assert again == run()
    assert again.best.loss <= first.best.loss
    assert len(measured) == 60 - after + 1, "the first is measured again, to know the model"


def test_progress_is_told_of_every_measurement() -> None:
    told: list[Found] = []
    found = run(progress=told.append)
    assert [each.tried for each in told] == list(range(1, 61))
    assert told[-1] == found
    assert all(a.best.loss >= b.best.loss for a, b in pairwise(told))


def test_what_is_no_number_is_never_best(tmp_path: Path) -> None:
    def loss(factors: tuple[float, ...]) -> float:
        return math.nan if factors[-1] > 3 else bowl(factors)

    state = tmp_path / "search.json"
    found = run(loss=StoredLosses(state, loss, factor=4))
    assert found.formulas["interpolate"].loss == math.inf
    assert found == run(loss=StoredLosses(state, loss, factor=4)) == run(loss=loss)


def test_seeds_differ() -> None:
    other = SearchSettings(population=8, mutations=4, crossovers=4, parents=6, seed=1)
    assert run(plan=other).best != run().best


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "invalid JSON"),
        ("[]", "the losses of a search"),
        ('{"factors": [[1]], "losses": [], "factor": 4}', "the losses of a search"),
        ('{"factors": [[1]], "losses": [2], "factor": 8}', "of the same factor"),
        ('{"factors": [[1]], "losses": [2], "factor": 4}', "same model and text"),
    ],
)
def test_losses_that_are_damaged_or_of_another_search(
    tmp_path: Path, content: str, message: str
) -> None:
    state = tmp_path / "search.json"
    state.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        StoredLosses(state, lambda factors: 3.0, factor=4)
    assert state.read_text() == content


def test_one_pair() -> None:
    rope = create("rope", head_dim=2)
    found = search_factors(rope, lambda f: abs(f[0] - 2), factor=4, length=64, budget=40)
    assert found.best.loss < 0.2


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="budget"):
        run(budget=0)
    with pytest.raises(ArgumentError, match="factor"):
        run(factor=0.5)
    with pytest.raises(ArgumentError, match="population"):
        SearchSettings(population=0)
    with pytest.raises(ArgumentError, match="probability"):
        SearchSettings(probability=0.0)
    with pytest.raises(NotApplicable):
        search_factors(create("alibi", heads=2), lambda _: 0.0, factor=2, length=64)
