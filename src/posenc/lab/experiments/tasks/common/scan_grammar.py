"""SCAN's commands and their actions, from its grammar (Lake and Baroni 2018, figures 6 and 7).

A command is a phrase, or two joined by "and" or "after"; a phrase is an action with its direction,
once, twice or thrice::

    C -> S and S | S after S | S
    S -> V twice | V thrice | V
    V -> U | U left | U right | turn [opposite|around] left | ... | U opposite left | U around left
    U -> walk | look | run | jump
"""

from __future__ import annotations

from functools import cache
from itertools import product

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
