"""LongRoPE's search for the divisor of each pair."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError, CheckpointError
from posenc.extension.fitting import (
    require_factor,
    require_length,
    require_rope,
    require_unstretched,
)
from posenc.extension.methods.ntk import ntk
from posenc.extension.methods.yarn import yarn
from posenc.storage import make_folder, read_json, write_json

__all__ = ["Found", "Plan", "Tried", "search_factors"]

Factors = tuple[float, ...]

MARGIN = 1.25
"""Factors go up to this many times the stretch, as in the paper."""

STEP = 0.01
"""Factors are multiples of this."""

SAME = 1e-3
"""Losses of one model on one text differ by a smaller share of themselves, machines included."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an evolutionary search goes; the defaults are the paper's.

    Args:
        population: individuals of the first generation.
        mutations, crossovers: individuals of each that follows.
        parents: how many of the best so far these are made from.
        probability: of a factor to mutate.
        seed: of all draws.

    Raises:
        ArgumentError: when a count is below 1, or ``probability`` is none.
    """

    population: int = 64
    mutations: int = 16
    crossovers: int = 16
    parents: int = 32
    probability: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("population", "mutations", "crossovers", "parents"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    name, expected="1 or more", got=getattr(self, name), remedy="See Plan."
                )
        if not 0 < self.probability <= 1:
            raise ArgumentError(
                "probability",
                expected="0 < probability ≤ 1",
                got=self.probability,
                remedy="The paper's is 0.3.",
            )


@dataclass(frozen=True)
class Tried:
    """One set of factors and its loss; infinite where that was no number."""

    factors: Factors
    loss: float


@dataclass(frozen=True)
class Found:
    """State of a search.

    Args:
        best: of all so far.
        tried: how many have been.
        budget: how many are to be.
        formulas: interpolation, NTK and YaRN, which the search begins from, as far as tried.
    """

    best: Tried
    tried: int
    budget: int
    formulas: dict[str, Tried]


def search_factors(
    encoding: Encoding,
    loss: Callable[[Factors], float],
    *,
    factor: float,
    length: float,
    budget: int = 200,
    plan: Plan | None = None,
    state: Path | str | None = None,
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Search the divisors of a rope's pairs that give the least loss on a text.

    Individuals are ``[d/2]`` factors from 1 to 1.25·s that never fall from a pair to the next
    slower one. The first are those of interpolation, NTK and YaRN, and mutations of these; then
    the best are mutated (a factor drawn anew between its neighbours) and crossed, generation by
    generation, until ``budget`` losses have been measured. Nothing found is worse than the three
    formulas. Differs from the paper in that mutations keep the order instead of being thrown away
    where they break it, and in that the first tokens are not treated apart.

    Individual n is a function of the seed and of what was tried before it, so that a search that
    was stopped and one that was not end the same.

    Args:
        encoding: with the rope of training.
        loss: measures factors: ``extend(encoding, "longrope", long_factors=factors, …)`` in the
            model, on the same long text each time. What is no finite number counts as infinite.
        factor: s, 1 or more.
        length: L, the length it was trained at.
        budget: losses to measure, 1 or more.
        plan: how the search goes.
        state: a file that is written after every measurement; if it exists, the search goes on
            from there, also with a larger budget. The first individual is then measured again: a
            loss that differs is that of another model or text.
        progress: told after every measurement.

    Raises:
        ArgumentError: when it has no rope that is as trained, or an argument is out of its domain.
        CheckpointError: when ``state`` is damaged or of another search.
        OutputError: when ``state`` cannot be written.

    Reference: Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
    section 3.2.

    >>> import posenc
    >>> rope = posenc.create("rope", head_dim=8)
    >>> found = search_factors(rope, lambda f: abs(sum(f) - 9), factor=4, length=64, budget=60)
    >>> found.tried, found.best.loss < min(t.loss for t in found.formulas.values())
    (60, True)
    """
    rope = require_unstretched(require_rope(encoding, "the search"), "the search")
    factor, length = require_factor(factor), require_length(length)
    if budget < 1:
        raise ArgumentError("budget", expected="1 or more", got=budget, remedy="Try 200.")
    plan = Plan() if plan is None else plan
    starts = _formulas(encoding, rope, factor, length)
    told = {"plan": vars(plan), "factor": factor, "length": length, "starts": [*starts.values()]}
    tried = _resumed(state, told)
    if tried:
        _require_same(state, tried[0], float(loss(tried[0].factors)))
    found = _found(tried, budget, starts)
    while len(tried) < budget:
        individual = _propose(tried, [*starts.values()], factor, plan)
        measured = float(loss(individual))
        tried.append(Tried(individual, measured if math.isfinite(measured) else math.inf))
        _save(state, told, tried)
        found = _found(tried, budget, starts)
        if progress is not None and found is not None:
            progress(found)
    assert found is not None  # the budget is at least 1
    return found


def _formulas(encoding: Encoding, rope: Rope, factor: float, length: float) -> dict[str, Factors]:
    pairs = rope.rotated // 2
    found: dict[str, Factors] = {"interpolate": (factor,) * pairs}
    if pairs > 1:
        made = {
            "ntk": ntk(encoding, factor=factor),
            "yarn": yarn(encoding, factor=factor, length=length),
        }
        for name, each in made.items():
            divisors = require_rope(each, name).divisors
            assert divisors is not None  # both divide
            found[name] = _ordered(divisors, factor)
    return found


def _propose(
    tried: Sequence[Tried], starts: Sequence[Factors], factor: float, plan: Plan
) -> Factors:
    """The next individual, from all that were tried before its generation."""
    number = len(tried)
    if number < len(starts):
        return starts[number]
    known = {each.factors for each in tried}
    size = plan.mutations + plan.crossovers
    later = number - max(plan.population, len(starts))
    before = tried if later < 0 else tried[: number - later % size]
    best = sorted(before, key=lambda each: each.loss)[: plan.parents]
    for attempt in range(20):
        draw = random.Random(f"{plan.seed}/{number}/{attempt}")
        if later < 0:
            individual = _mutated(draw.choice(starts), factor, plan.probability, draw)
        elif later % size < plan.mutations:
            individual = _mutated(draw.choice(best).factors, factor, plan.probability, draw)
        else:
            one, other = (draw.choice(best).factors for _ in range(2))
            crossed = [draw.choice(pair) for pair in zip(one, other, strict=True)]
            individual = _ordered(crossed, factor)
        if individual not in known:
            return individual
    return _mutated(best[0].factors, factor, 1.0, draw)


def _mutated(factors: Factors, factor: float, probability: float, draw: random.Random) -> Factors:
    """Some factors drawn anew, each between the one before it and the one after."""
    mutated = list(factors)
    for t in range(len(mutated)):
        if draw.random() < probability:
            low = mutated[t - 1] if t else 1.0
            high = mutated[t + 1] if t + 1 < len(mutated) else MARGIN * factor
            mutated[t] = draw.uniform(low, max(low, high))
    return _ordered(mutated, factor)


def _ordered(factors: Sequence[float], factor: float) -> Factors:
    """The factors inside their bounds, on the grid, none below the one before."""
    ordered: list[float] = []
    for each in factors:
        inside = round(min(max(each, 1.0), MARGIN * factor) / STEP) * STEP
        ordered.append(round(max([inside, *ordered[-1:]]), 6))
    return tuple(ordered)


def _found(tried: Sequence[Tried], budget: int, starts: dict[str, Factors]) -> Found | None:
    if not tried:
        return None
    formulas = dict(zip(starts, tried, strict=False))
    return Found(min(tried, key=lambda each: each.loss), len(tried), budget, formulas)


def _save(state: Path | str | None, told: dict[str, Any], tried: Sequence[Tried]) -> None:
    if state is None:
        return
    losses = [None if math.isinf(each.loss) else each.loss for each in tried]
    make_folder(Path(state).parent)
    write_json(Path(state), told | {"factors": [each.factors for each in tried], "losses": losses})


def _require_same(state: Path | str | None, first: Tried, again: float) -> None:
    """Refuse a state that was measured with something else."""
    measured = again if math.isfinite(again) else math.inf
    if not math.isclose(measured, first.loss, rel_tol=SAME):
        raise CheckpointError(
            str(state),
            expected=f"a search on the same model and text, where the first loss is {measured:.6g}",
            got=f"{first.loss:.6g}",
            remedy="Give another file, or remove this one to begin anew.",
        )


def _resumed(state: Path | str | None, told: dict[str, Any]) -> list[Tried]:
    if state is None or not Path(state).exists():
        return []
    remedy = "Give another file, or remove this one to begin anew."
    saved = read_json(Path(state), expected="the state of a search", remedy=remedy)
    expected = {"plan", "factor", "length", "starts", "factors", "losses"}
    if not isinstance(saved, dict) or set(saved) != expected:
        raise CheckpointError(
            str(state), expected="the state of a search", got="something else", remedy=remedy
        )
    told = told | {"starts": [list(each) for each in told["starts"]]}
    for name, value in told.items():
        if saved[name] != value:
            raise CheckpointError(
                str(state),
                expected=f"a search with the same {name}",
                got=str(saved[name])[:80],
                remedy=remedy,
            )
    found, pairs = _tried(saved["factors"], saved["losses"]), len(told["starts"][0])
    if found is None or any(len(each.factors) != pairs for each in found):
        raise CheckpointError(
            str(state),
            expected=f"{pairs} factors and a loss of each set that was tried",
            got="something else",
            remedy=remedy,
        )
    return found


def _tried(factors: object, losses: object) -> list[Tried] | None:
    """Candidates tried so far, from JSON values; None if they do not fit."""
    if not (isinstance(factors, list) and isinstance(losses, list) and len(factors) == len(losses)):
        return None

    def number(value: object) -> bool:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]

    found = []
    for each, loss in zip(factors, losses, strict=True):
        if not isinstance(each, list) or not all(map(number, each)):
            return None
        if loss is not None and not number(loss):
            return None
        found.append(Tried(tuple(map(float, each)), math.inf if loss is None else float(loss)))
    return found
