"""Tasks on symbols: copied, reversed, sorted, recalled, added, counted; more than in training."""

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
    answered,
    rewriting,
)
from posenc.lab.experiments.tasks.common.task import TaskEntry, TaskSettings, times


def copy() -> TaskEntry:
    """Copy a sequence of symbols."""
    return rewriting(
        name="copy",
        job="Copy a sequence",
        rewrite=lambda symbols: symbols,
        expectation="Relative biases and NoPE carry over to somewhat longer sequences, T5's best "
        "of all; sinusoids and learned tables fail at once past the training length (Kazemnejad et "
        "al. 2023). Randomized positions carry over further (Ruoss et al. 2023). Unsorted ones, "
        "the control, must not copy.",
    )


def reverse() -> TaskEntry:
    """Reverse a sequence of symbols."""
    return rewriting(
        name="reverse",
        job="Reverse a sequence",
        rewrite=lambda symbols: symbols[::-1],
        expectation="Learned within the training length by all; past it T5's biases and NoPE keep "
        "most, ALiBi less, rotations and sinusoids little (Kazemnejad et al. 2023). Unsorted "
        "random positions, the control, must not reverse.",
    )


def sorting() -> TaskEntry:
    """Sort a sequence of symbols."""
    return rewriting(
        name="sorting",
        job="Sort a sequence",
        rewrite=sorted,
        expectation="The answer does not depend on where symbols stand, so that NoPE does as well "
        "as any, and unsorted random positions are no handicap; what fails past the training "
        "length are sinusoids, at positions they were not trained at (Ruoss et al. 2023, bucket "
        "sort).",
        symbols=32,
    )


def _recall(settings: TaskSettings) -> Algorithm:
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


def recall() -> TaskEntry:
    """Associative recall: which value went with the key?"""
    return algorithm_entry(
        _recall,
        summary="Associative recall: name the value that went with a key, among more pairs",
        data="random pairs of a key and a value, generated; each key is asked once",
        metric="share of answers right; share of examples with every answer right",
        expectation="A head that looks one token back and one that looks for the key are enough "
        "(Olsson et al. 2022), so that relative encodings carry over to more pairs, while "
        "sinusoids and learned tables lose the first head past the training length. Unsorted "
        "random positions, the control, cannot tell which value followed a key.",
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


PLUS = SYMBOLS + 10


def _addition(settings: TaskSettings) -> Algorithm:
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


def addition() -> TaskEntry:
    """Add two numbers, digit by digit."""
    return algorithm_entry(
        _addition,
        summary="Add two numbers of more digits than in training",
        data="random sums, generated; both summands have the same number of digits",
        metric="share of digits right; share of whole sums right",
        expectation="No encoding of this list adds numbers of twice the digits: that takes "
        "positions that count within each number (Abacus, McLeish et al. 2024) or random ones "
        "(Ruoss et al. 2023). Within the training length relative encodings learn it fastest. "
        "Unsorted random positions, the control, must fail.",
        defaults=replace(DEFAULTS, train_length=8),
        options={"least_first": True},
        length_unit="digits",
    )


EVEN, ODD = 0, 1
ZERO, ONE = SYMBOLS, SYMBOLS + 1


def random_bits(count: int, random: Random) -> Example:
    """Random bits, each with the parity of the ones up to it."""
    inputs, targets, parity = [], [], 0
    for _ in range(count):
        bit = random.randrange(2)
        parity ^= bit
        inputs.append(ONE if bit else ZERO)
        targets.append(ODD if parity else EVEN)
    return Example(inputs, targets)


def _parity(settings: TaskSettings) -> Algorithm:
    return Algorithm(
        title="Parity of longer sequences of bits than in training",
        data=f"random bits, 1 to {settings.train_length} of them in training",
        definition="parity",
        vocabulary=SYMBOLS + 2,
        draw=random_bits,
        width=lambda length: length,
        trivial=0.5,
        unit="bits",
        scored="parities",
    )


def parity() -> TaskEntry:
    """Parity: is the number of ones so far odd?"""
    return algorithm_entry(
        _parity,
        summary="Tell whether the ones so far are odd in number, after every bit",
        data="random bits, generated",
        metric="share of parities right; share of sequences with every parity right",
        expectation="Transformers can fit parity up to the training length, and no encoding "
        "carries it further: all fall to a guess past it (Hahn 2020; Bhattamishra et al. 2020; "
        "Ruoss et al. 2023). A lab in which one holds at 8 times has a leak.",
        length_unit="bits",
    )


CLOSED, OPEN = 0, 1
OPENING, CLOSING = SYMBOLS, SYMBOLS + 1

OPENS = 0.4
"""Probability that an open bracket is followed by another; the depth often returns to 0."""

OPEN_SHARE = 2 / 3
"""Share of even places, in the long run, at which a bracket is open."""


def open_brackets(brackets: int, random: Random) -> Example:
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


def _dyck(settings: TaskSettings) -> Algorithm:
    return Algorithm(
        title="Brackets left open in longer words than in training",
        data=f"random words of brackets, 2 to {settings.train_length} of them in training",
        definition="dyck",
        vocabulary=SYMBOLS + 2,
        draw=open_brackets,
        shortest=2,
        width=lambda length: length,
        trivial=OPEN_SHARE,
        trivial_rule="always open",
        unit="brackets",
        scored="places",
    )


def dyck() -> TaskEntry:
    """Dyck-1: is a bracket still open?"""
    return algorithm_entry(
        _dyck,
        summary="Dyck-1: tell at every place of a word of brackets whether one is open",
        data="random words of brackets, generated",
        metric="share of places right; share of words with every place right",
        expectation="Counting needs no positions but where to begin: NoPE under a causal mask "
        "learns it and carries over, absolute encodings hurt past the training length "
        "(Bhattamishra et al. 2020). The sum alone decides, so that unsorted random positions need "
        "not fail.",
        defaults=replace(DEFAULTS, test_lengths=times(1, 2, 4, 8, 16)),
        length_unit="brackets",
    )
