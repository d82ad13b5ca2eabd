"""Associative recall: which value went with the key?"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from posenc.errors import ArgumentError
from posenc.lab.experiments.tasks.common.algorithm import (
    DEFAULTS,
    SEPARATOR,
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
)
from posenc.lab.experiments.tasks.common.task import TaskSettings, times


def _rule(settings: TaskSettings) -> Algorithm:
    keys, values = settings.options["keys"], settings.options["values"]
    if keys < settings.lengths[-1]:
        raise ArgumentError(
            "keys",
            expected=f"at least {settings.lengths[-1]}, the pairs of the longest test",
            got=keys,
            remedy="Raise it, or test fewer pairs.",
        )
    if values < 2:
        raise ArgumentError("values", expected="2 or more", got=values, remedy="Raise it.")
    every_key = range(SYMBOLS, SYMBOLS + keys)
    every_value = range(SYMBOLS + keys, SYMBOLS + keys + values)

    def draw(pairs: int, random: Random) -> Example:
        """Pairs, a separator, then every key in another order, each followed by its value."""
        asked = random.sample(every_key, pairs)
        value = dict(zip(asked, random.choices(every_value, k=pairs), strict=True))
        listed = [token for pair in value.items() for token in pair]
        random.shuffle(asked)
        recalled = [token for key in asked for token in (key, value[key])]
        targets = [answer for key in asked for answer in (value[key], None)]
        return Example([*listed, SEPARATOR, *recalled], [*[None] * (len(listed) + 1), *targets])

    return Algorithm(
        title="Recall which value went with a key, among more pairs than in training",
        data=f"pairs of {keys} keys and {values} values, 1 to {settings.train_length} of "
        "them in training",
        definition="recall",
        vocabulary=SYMBOLS + keys + values,
        draw=draw,
        width=lambda length: 4 * length + 1,
        trivial=1 / values,
        unit="pairs",
        scored="answers",
    )


ENTRY = algorithm_entry(
    _rule,
    summary="Associative recall: name the value that went with a key, among more pairs",
    data="random pairs of a key and a value, generated; each key is asked once",
    metric="share of answers right; share of examples with every answer right",
    expectation="A head that looks one token back and one that looks for the key are enough "
    "(Olsson et al. 2022), so that relative encodings carry over to more pairs, while sinusoids "
    "and learned tables lose the first head past the training length. Unsorted random positions, "
    "the control, cannot tell which value followed a key.",
    defaults=replace(
        DEFAULTS,
        train_length=8,
        test_lengths=times(1, 2, 4, 8),
        # At 5e-3, or among 128 keys, nothing is learned in 700 steps.
        learning_rate=2e-3,
    ),
    options={"keys": 64, "values": 16},
    length_unit="pairs",
)
