"""Parameters of which only some run in the suite, and all with ``make test-exhaustive``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product

import pytest


def kept_in_suite(names: Iterable[str], kept: Collection[str]) -> list[object]:
    """``names``, of which those not in ``kept`` are marked exhaustive."""
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]


def in_turn(rounds: int, *axes: Collection[object]) -> list[object]:
    """The product of axes; those combinations in which they do not take turns are exhaustive.

    In round r the values n of all axes meet, each axis r further on than the one before, until the
    longest has ended. So the suite has each value of each axis, ``rounds`` times or more where no
    axis is shorter than that.

    Args:
        rounds: how often the axes are gone through.
        axes: values, tuples of those of several parameters, or by name of the case.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(_name(x), x) for x in axis]
        for axis in axes
    ]
    longest = max(map(len, named))
    kept = {
        tuple((n + r * place) % len(axis) for place, axis in enumerate(named))
        for n in range(longest)
        for r in range(rounds)
    }
    return [
        pytest.param(
            *(value for _, case in met for value in _values(case)),
            id="-".join(name for name, _ in met),
            marks=[] if indices in kept else [pytest.mark.exhaustive],
        )
        for indices in product(*(range(len(axis)) for axis in named))
        for met in [[axis[at] for axis, at in zip(named, indices, strict=True)]]
    ]


def _values(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _name(value: object) -> str:
    return " ".join(str(part) for part in _values(value) if not isinstance(part, Mapping))
