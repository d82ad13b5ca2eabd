"""Dyck-1: is a bracket still open?"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from posenc.lab.experiments.tasks.common.algorithm import (
    DEFAULTS,
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
)
from posenc.lab.experiments.tasks.common.task import TaskSettings, times

CLOSED, OPEN = 0, 1
OPENING, CLOSING = SYMBOLS, SYMBOLS + 1

OPENS = 0.4
"""Probability that an open bracket is followed by another; the depth often returns to 0."""

OPEN_SHARE = 2 / 3
"""Share of even places, in the long run, at which a bracket is open."""


def draw(brackets: int, random: Random) -> Example:
    """The beginning of a word of balanced brackets.

    After every second bracket it is asked whether one is open, so whether the word may be closed
    further (after odd ones it always may).
    """
    inputs: list[int] = []
    targets: list[int | None] = []
    depth = 0
    for place in range(1, brackets + 1):
        opening = depth == 0 or random.random() < OPENS
        depth += 1 if opening else -1
        inputs.append(OPENING if opening else CLOSING)
        state = OPEN if depth else CLOSED
        targets.append(None if place % 2 else state)
    return Example(inputs, targets)


def _rule(settings: TaskSettings) -> Algorithm:
    return Algorithm(
        title="Brackets left open in longer words than in training",
        data=f"random words of brackets, 2 to {settings.train_length} of them in training",
        definition="dyck",
        vocabulary=SYMBOLS + 2,
        draw=draw,
        shortest=2,
        width=lambda length: length,
        trivial=OPEN_SHARE,
        trivial_rule="always open",
        unit="brackets",
        scored="places",
    )


ENTRY = algorithm_entry(
    _rule,
    summary="Dyck-1: tell at every place of a word of brackets whether one is open",
    data="random words of brackets, generated",
    metric="share of places right; share of words with every place right",
    expectation="Counting needs no positions but where to begin: NoPE under a causal mask learns "
    "it and carries over, absolute encodings hurt past the training length (Bhattamishra et al. "
    "2020). The sum alone decides, so that unsorted random positions need not fail.",
    defaults=replace(DEFAULTS, test_lengths=times(1, 2, 4, 8, 16)),
    length_unit="brackets",
)
