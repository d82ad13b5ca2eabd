"""Search for LongRoPE's factors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posenc.arguments import Count, Fraction, Length, check_fields, typed
from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.extension.fitting import Stretch, Trained, require_rope
from posenc.extension.methods.ntk import ntk
from posenc.extension.methods.yarn import yarn

Factors = tuple[float, ...]

MARGIN = 1.25
"""Largest factor relative to the extension, as in the paper."""

STEP = 0.01
"""Factors are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of an evolutionary search; the defaults are the paper's.

    Args:
        population: individuals of the first generation.
        mutations, crossovers: individuals of later generations.
        parents: number of the best so far that these are made from.
        probability: of a factor to mutate.
        seed: of all draws.

    Raises:
        ArgumentError: for a value outside its domain.
    """

    population: Count = 64
    mutations: Count = 16
    crossovers: Count = 16
    parents: Count = 32
    probability: Fraction = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Tried:
    """A set of factors and its loss, infinite if that was not finite."""

    factors: Factors
    loss: float


@dataclass(frozen=True)
class Found:
    """State of a search.

    Args:
        best: of all so far.
        tried: number of losses measured.
        budget: number of losses to measure.
        formulas: interpolation, NTK and YaRN, which the search starts from, as far as tried.
    """

    best: Tried
    tried: int
    budget: int
    formulas: dict[str, Tried]


@typed
def search_factors(
    encoding: Encoding,
    loss: Callable[[Factors], float],
    *,
    factor: Stretch,
    length: Trained,
    budget: Length = 200,
    plan: SearchSettings | None = None,
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Search the divisors of RoPE's pairs that give the least loss on a text.

    Individuals are ``[d/2]`` factors from 1 to 1.25·s, non-decreasing towards slower pairs. The
    search starts from interpolation, NTK and YaRN and mutations of these; then the best are mutated
    (a factor drawn between its neighbours) and crossed, generation by generation, until ``budget``
    losses have been measured. Differs from the paper in that mutations keep the order instead of
    being discarded, and in that the first tokens are not treated separately. Equal losses give an
    equal search: one that stores its losses by factors can be interrupted, and goes on with a
    larger budget.

    Args:
        encoding: with RoPE as trained.
        loss: of ``extend(encoding, "longrope", long_factors=factors, …)`` in the model, on the same
            long text each time; infinite if not finite.
        factor: s, 1 or more.
        length: L, the trained length.
        budget: losses to measure, 1 or more.
        plan: settings of the search.
        progress: called after every measurement.

    Raises:
        ArgumentError: if it has no RoPE as trained, or an argument is outside its domain.

    Reference: Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
    section 3.2.

    >>> import posenc
    >>> rope = posenc.create("rope", head_dim=8)
    >>> found = search_factors(rope, lambda f: abs(sum(f) - 9), factor=4, length=64, budget=60)
    >>> found.tried, found.best.loss < min(t.loss for t in found.formulas.values())
    (60, True)
    """
    rope = require_rope(encoding, "the search", as_trained=True)
    plan = SearchSettings() if plan is None else plan
    formulas = _formulas(encoding, rope, factor, length)
    starts = list(formulas.values())
    tried: list[Tried] = []

    def found() -> Found:
        measured = dict(zip(formulas, tried, strict=False))
        return Found(min(tried, key=lambda item: item.loss), len(tried), budget, measured)

    while len(tried) < budget:
        individual = _propose(tried, starts, factor, plan)
        measured = float(loss(individual))
        tried.append(Tried(individual, measured if math.isfinite(measured) else math.inf))
        if progress is not None:
            progress(found())
    return found()


def _formulas(encoding: Encoding, rope: Rope, factor: float, length: float) -> dict[str, Factors]:
    pairs = rope.rotated // 2
    formulas: dict[str, Factors] = {"interpolate": (factor,) * pairs}
    if pairs > 1:
        extended = {
            "ntk": ntk(encoding, factor=factor),
            "yarn": yarn(encoding, factor=factor, length=length),
        }
        for name, by_formula in extended.items():
            divisors = require_rope(by_formula, name).divisors
            assert divisors is not None  # both divide
            formulas[name] = _ordered(divisors, factor)
    return formulas


def _propose(
    tried: Sequence[Tried], starts: Sequence[Factors], factor: float, plan: SearchSettings
) -> Factors:
    """The next individual, from all that were tried before its generation."""
    number = len(tried)
    if number < len(starts):
        return starts[number]
    evaluated = {item.factors for item in tried}
    size = plan.mutations + plan.crossovers
    later = number - max(plan.population, len(starts))
    before = tried if later < 0 else tried[: number - later % size]
    best = sorted(before, key=lambda item: item.loss)[: plan.parents]
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
        if individual not in evaluated:
            return individual
    return _mutated(best[0].factors, factor, 1.0, draw)


def _mutated(factors: Factors, factor: float, probability: float, draw: random.Random) -> Factors:
    """Some factors drawn anew between their neighbours."""
    mutated = list(factors)
    for t in range(len(mutated)):
        if draw.random() < probability:
            low = mutated[t - 1] if t else 1.0
            high = mutated[t + 1] if t + 1 < len(mutated) else MARGIN * factor
            mutated[t] = draw.uniform(low, max(low, high))
    return _ordered(mutated, factor)


def _ordered(factors: Sequence[float], factor: float) -> Factors:
    """The factors within their bounds, on the grid, non-decreasing."""
    ordered: list[float] = []
    for value in factors:
        inside = round(min(max(value, 1.0), MARGIN * factor) / STEP) * STEP
        ordered.append(round(max([inside, *ordered[-1:]]), 6))
    return tuple(ordered)
