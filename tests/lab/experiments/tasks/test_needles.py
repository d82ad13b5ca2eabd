"""Needles in training windows and in haystacks."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.lab.experiments.tasks.common import needles

ROWS, LENGTH = 200, 32


def hidden() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Text, its next bytes, and both with needles in."""
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(32, 127, (ROWS, LENGTH + 1), generator=generator)
    inputs, targets = text[:, :-1].clone(), text[:, 1:].clone()
    needles.hide(inputs, targets, generator)
    return text[:, :-1], text[:, 1:], inputs, targets


def is_needle(tokens: Tensor) -> Tensor:
    return (tokens >= needles.FIRST) & (tokens < needles.FIRST + needles.KINDS)


def test_each_window_has_one_needle_in_its_first_half() -> None:
    _, _, inputs, _ = hidden()
    assert (is_needle(inputs).sum(1) == 1).all()
    assert is_needle(inputs)[:, : LENGTH // 2].any(1).all()
    kinds = inputs[is_needle(inputs)].unique()
    assert len(kinds) == needles.KINDS


def test_queries_come_after_the_needle_and_answer_with_it() -> None:
    _, _, inputs, targets = hidden()
    place = is_needle(inputs).int().argmax(1)
    needle = inputs[torch.arange(ROWS), place]
    queries = inputs == needles.QUERY
    assert queries.any(1).all()
    assert (queries.int().argmax(1) > place).all()
    assert queries[:, -1].any(), "a query may be the last byte"
    for row in range(ROWS):
        assert (targets[row][queries[row]] == needle[row]).all()


def test_all_other_targets_are_those_of_the_text() -> None:
    text, following, inputs, targets = hidden()
    queries = inputs == needles.QUERY
    assert torch.equal(is_needle(targets), queries)
    assert torch.equal(targets[~queries], following[~queries])
    assert torch.equal(inputs[~queries & ~is_needle(inputs)], text[~queries & ~is_needle(inputs)])
    assert (~queries).float().mean() > 0.5


def test_haystacks_hide_the_needle_far_back_and_ask_at_the_end() -> None:
    generator = torch.Generator().manual_seed(5)
    windows = torch.randint(256, (ROWS, 64), generator=generator)
    stacks, answers = needles.haystacks(windows, generator)
    assert (stacks[:, -1] == needles.QUERY).all()
    assert ((stacks == needles.QUERY).sum(1) == 1).all()
    assert (is_needle(stacks).sum(1) == 1).all()
    assert is_needle(stacks)[:, :8].any(1).all()
    assert torch.equal(stacks[is_needle(stacks)], answers)
    assert len(answers.unique()) == needles.KINDS
