"""Add two numbers, digit by digit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from posenc.lab.experiments.tasks.common.algorithm import (
    DEFAULTS,
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
    answered,
)
from posenc.lab.experiments.tasks.common.task import TaskSettings

PLUS = SYMBOLS + 10


def _rule(settings: TaskSettings) -> Algorithm:
    backwards: bool = settings.options["least_first"]

    def written(number: int, digits: int) -> list[int]:
        text = f"{number:0{digits}d}"
        return [SYMBOLS + int(digit) for digit in (text[::-1] if backwards else text)]

    def draw(digits: int, random: Random) -> Example:
        first, second = random.randrange(10**digits), random.randrange(10**digits)
        question = [*written(first, digits), PLUS, *written(second, digits)]
        return answered(question, written(first + second, digits + 1))

    order = "the least significant digit first" if backwards else "as people write them"
    return Algorithm(
        title="Add numbers of more digits than in training",
        data=f"random sums, written {order}, of 1 to {settings.train_length} digits in training",
        definition="addition",
        vocabulary=SYMBOLS + 11,
        draw=draw,
        width=lambda length: 3 * length + 3,
        trivial=0.1,
        unit="digits",
        scored="digits of the sums",
    )


ENTRY = algorithm_entry(
    _rule,
    summary="Add two numbers of more digits than in training",
    data="random sums, generated; both summands have the same number of digits",
    metric="share of digits right; share of whole sums right",
    expectation="No encoding of this list adds numbers of twice the digits: that takes positions "
    "that count within each number (Abacus, McLeish et al. 2024) or random ones (Ruoss et al. "
    "2023). Within the training length relative encodings learn it fastest. Unsorted random "
    "positions, the control, must fail.",
    defaults=replace(DEFAULTS, train_length=8),
    options={"least_first": True},
    length_unit="digits",
)
