"""Parity: is the number of ones so far odd?"""

from __future__ import annotations

from random import Random

from posenc.lab.experiments.tasks.common.algorithm import (
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
)
from posenc.lab.experiments.tasks.common.task import TaskSettings

EVEN, ODD = 0, 1
ZERO, ONE = SYMBOLS, SYMBOLS + 1


def draw(bits: int, random: Random) -> Example:
    """Random bits, each with the parity of the ones up to it."""
    inputs, targets, parity = [], [], 0
    for _ in range(bits):
        bit = random.randrange(2)
        parity ^= bit
        inputs.append(ONE if bit else ZERO)
        targets.append(ODD if parity else EVEN)
    return Example(inputs, targets)


def _rule(settings: TaskSettings) -> Algorithm:
    return Algorithm(
        title="Parity of longer sequences of bits than in training",
        data=f"random bits, 1 to {settings.train_length} of them in training",
        definition="parity",
        vocabulary=SYMBOLS + 2,
        draw=draw,
        width=lambda length: length,
        trivial=0.5,
        unit="bits",
        scored="parities",
    )


ENTRY = algorithm_entry(
    _rule,
    summary="Tell whether the ones so far are odd in number, after every bit",
    data="random bits, generated",
    metric="share of parities right; share of sequences with every parity right",
    expectation="Transformers can fit parity up to the training length, and no encoding carries "
    "it further: all fall to a guess past it (Hahn 2020; Bhattamishra et al. 2020; Ruoss et al. "
    "2023). A lab in which one holds at 8 times has a leak.",
    length_unit="bits",
)
