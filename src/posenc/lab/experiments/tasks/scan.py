"""SCAN: commands to actions, tested on longer action sequences than in training.

Commands and their actions are of SCAN's grammar (Lake and Baroni 2018, figures 6 and 7).

A command is a phrase, or two joined by "and" or "after"; a phrase is an action with its direction,
once, twice or thrice::

    C -> S and S | S after S | S
    S -> V twice | V thrice | V
    V -> U | U left | U right | turn [opposite|around] left | ... | U opposite left | U around left
    U -> walk | look | run | jump
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

from posenc.errors import ArgumentError
from posenc.lab.experiments.tasks.common.algorithm import (
    DEFAULTS,
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
    answered,
)
from posenc.lab.experiments.tasks.common.task import TaskSettings

VERBS = {"walk": "I_WALK", "look": "I_LOOK", "run": "I_RUN", "jump": "I_JUMP"}
TURNS = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}
TIMES = {"twice": 2, "thrice": 3}

AROUND = 4
"""Turns in a full circle."""

LONGEST_TRAINED = 22
"""The length split trains on commands of at most so many actions."""


@cache
def commands() -> tuple[str, ...]:
    """All commands of the grammar, 20,910 of them."""
    directed = [
        " ".join(words)
        for verb in (*VERBS, "turn")
        for turn in TURNS
        for words in ([verb, turn], [verb, "opposite", turn], [verb, "around", turn])
    ]
    simple = [*VERBS, *directed]
    phrases = simple + [f"{action} {times}" for action in simple for times in TIMES]
    joined = [f"{a} {word} {b}" for word in ("and", "after") for a, b in product(phrases, repeat=2)]
    return (*phrases, *joined)


def meaning(command: str) -> list[str]:
    """The actions that a command of the grammar asks for."""
    for word in (" and ", " after "):
        first, joined, second = command.partition(word)
        if joined:
            parts = (first, second) if word == " and " else (second, first)
            return [action for part in parts for action in meaning(part)]
    words = command.split()
    if words[-1] in TIMES:
        return meaning(" ".join(words[:-1])) * TIMES[words[-1]]
    verb, *manner = words
    done = [VERBS[verb]] if verb in VERBS else []
    if not manner:
        return done
    turn = [TURNS[manner[-1]]]
    if manner[0] == "around":
        return (turn + done) * AROUND
    return (turn * 2 if manner[0] == "opposite" else turn) + done


@cache
def split() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Commands and their actions, to train on and to test on: SCAN's length split."""
    meanings = {command: meaning(command) for command in commands()}
    return (
        {c: actions for c, actions in meanings.items() if len(actions) <= LONGEST_TRAINED},
        {c: actions for c, actions in meanings.items() if len(actions) > LONGEST_TRAINED},
    )


def _rule(settings: TaskSettings) -> Algorithm:
    trained, held_out = split()
    meanings = trained | held_out
    words = {word for command in meanings for word in command.split()}
    all_actions = {action for actions in meanings.values() for action in actions}
    tokens = {word: SYMBOLS + index for index, word in enumerate(sorted(words | all_actions))}
    by_length: dict[int, list[Example]] = defaultdict(list)
    training: list[Example] = []
    for command, actions in meanings.items():
        example = answered([tokens[w] for w in command.split()], [tokens[a] for a in actions])
        by_length[len(actions)].append(example)
        if command in trained:
            training.append(example)
    _require_lengths(settings, by_length)
    question = max(len(command.split()) for command in meanings)
    return Algorithm(
        title="SCAN: carry out commands that need more actions than any in training",
        data=f"SCAN's length split: {len(trained):,} commands of at most {LONGEST_TRAINED} "
        f"actions to train on, {len(held_out):,} longer ones",
        definition="scan, length split",
        vocabulary=SYMBOLS + len(tokens),
        draw=lambda length, random: random.choice(by_length[length]),
        train=lambda random: random.choice(training),
        width=lambda length: question + 1 + length,
        trivial=1 / len(all_actions),
        unit="actions",
    )


def _require_lengths(settings: TaskSettings, by_length: dict[int, list[Example]]) -> None:
    if settings.train_length != LONGEST_TRAINED:
        raise ArgumentError(
            "train_length",
            expected=f"{LONGEST_TRAINED}, where SCAN is split",
            got=settings.train_length,
            remedy="Leave it out.",
        )
    for length in settings.lengths:
        if length not in by_length:
            some = ", ".join(str(n) for n in sorted(by_length) if n >= LONGEST_TRAINED)
            raise ArgumentError(
                "test_lengths",
                expected=f"numbers of actions that commands have: {some}",
                got=length,
                remedy="Choose among them.",
            )


ENTRY = algorithm_entry(
    _rule,
    summary="SCAN's length split: carry out commands that need more actions than any in training",
    data="all 20,910 commands of SCAN's grammar (Lake and Baroni 2018), generated; at the training "
    "length it is tested on commands it has seen",
    metric="share of actions right; share of whole commands right",
    expectation="Little carries over: whole commands are right for T5's biases and NoPE at a few "
    "actions more, for ALiBi at fewer, and fail further on (Kazemnejad et al. 2023); sinusoids and "
    "learned tables fail at once. Unsorted random positions, the control, must fail at all "
    "lengths.",
    sample={"test_lengths": (24,)},
    defaults=replace(
        DEFAULTS,
        train_length=LONGEST_TRAINED,
        test_lengths=lambda length: (length, 24, 26, 28, 30, 32, 36, 40, 48),
    ),
    length_unit="actions",
)
