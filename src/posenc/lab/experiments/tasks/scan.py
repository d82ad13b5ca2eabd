"""SCAN: commands to actions, tested on longer action sequences than in training."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from posenc.errors import ArgumentError
from posenc.lab.experiments.tasks.common.algorithm import (
    DEFAULTS,
    SYMBOLS,
    Algorithm,
    Example,
    algorithm_entry,
    answered,
)
from posenc.lab.experiments.tasks.common.scan_grammar import LONGEST_TRAINED, split
from posenc.lab.experiments.tasks.common.task import TaskSettings


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
