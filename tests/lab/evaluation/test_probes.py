"""Needles, words to copy, and how answers are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc.lab.evaluation.suites.needles import (
    DEPTHS,
    PROMPT,
    WORD,
    ByteNeedles,
    KeyNeedles,
    copying,
    letters,
    repeat,
    shares_right,
)
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.training.seeding import generator

WINDOWS = torch.randint(32, 127, (6, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_needle_at_its_depth_and_the_question_last(depth: float) -> None:
    windows = WINDOWS.clone()
    windows[:, 7] = needles.FIRST  # text that has the mark already
    hidden, answers = ByteNeedles().hide(windows, depth, generator(1))
    marked = (hidden >= needles.FIRST) & (hidden < needles.FIRST + needles.KINDS)
    assert marked.sum(1).tolist() == [1] * 6
    assert marked.long().argmax(1).tolist() == [round(depth * 38)] * 6
    assert hidden.gather(1, marked.long().argmax(1, keepdim=True)).equal(answers)
    assert (hidden[:, -1] == needles.QUERY).all()
    assert windows[:, 7].eq(needles.FIRST).all(), "the text itself is not touched"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_pass_key_is_told_once_and_asked_for_at_the_end(depth: float) -> None:
    windows = torch.randint(97, 123, (4, 160), generator=torch.Generator().manual_seed(0))
    hidden, answers = KeyNeedles(lambda text: list(text.encode())).hide(
        windows, depth, generator(2)
    )
    assert hidden.shape == (4, 160)
    for row, answer in zip(hidden, answers, strict=True):
        text, key = bytes(row.tolist()).decode(), bytes(answer.tolist()).decode()
        assert text.endswith("\nThe pass key is" + key[:-1])
        assert text.count(f"The pass key is{key}. Remember it.") == 1
        assert abs(text.index(f"\nThe pass key is{key}") / (160 - 55) - depth) < 0.03


def test_the_word_to_copy_stands_whole_and_then_in_part() -> None:
    whole, answers = copying(WINDOWS, letters(), generator(3))
    assert whole.shape == WINDOWS.shape
    word = whole[:, -2 * WORD + 1 : -WORD + 1]
    assert whole[:, -WORD + 1 :].equal(word[:, :-1])
    assert answers.equal(word[:, PROMPT:])


def test_copying_by_looking_back_is_all_right_and_guessing_is_not() -> None:
    whole, answers = copying(WINDOWS, letters(), generator(3))

    def back(tokens: Tensor) -> Tensor:
        """The token that followed where this one stood a word earlier."""
        return torch.nn.functional.one_hot(tokens.roll(WORD - 1, 1), 128).float()

    assert shares_right(back, whole, answers, exact=False).eq(1).all()
    assert shares_right(back, whole, answers, exact=True).eq(1).all()
    zeros = torch.zeros(128)
    missed = shares_right(lambda t: zeros.expand(*t.shape, 128), whole, answers, exact=False)
    assert missed.shape == (6,)
    assert missed.eq(0).all()


@pytest.mark.parametrize(("latest", "limit"), [(0.5, 21), (0.25, 11)])
def test_training_rows_end_in_a_word_over_and_over(latest: float, limit: int) -> None:
    rows = repeat(WINDOWS, generator(4), latest=latest)
    changed = (rows != WINDOWS).long().argmax(1)
    assert (changed < limit).all()
    for row, begin in zip(rows, changed.tolist(), strict=True):
        tail = row[begin:].tolist()
        assert any(tail[:-n] == tail[n:] for n in range(8, len(tail))), "no period"
        assert all(97 <= each < 123 for each in tail)
