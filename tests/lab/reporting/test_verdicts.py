"""A word on a change, at its limits, and numbers as they are written."""

from __future__ import annotations

import math

import pytest

from posenc.lab.reporting.numbers import Estimate, count_in_words, setting_in_words, size_in_words
from posenc.lab.reporting.opening import deterioration, word


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (0.05, None, "holds"),
        (0.051, None, "degrades"),
        (0.25, None, "degrades"),
        (0.251, None, "breaks"),
        (-0.4, None, "holds"),
        (0.15, 0.1, "degrades"),
        (0.15, 0.11, "unsure"),
        (0.3, 0.26, "unsure"),
        (0.3, 0.2, "breaks"),
    ],
)
def test_the_word_follows_from_the_interval(mean: float, half: float | None, expected: str) -> None:
    assert word(Estimate(mean, half, 3)) == expected


def test_a_deterioration_is_a_share_of_the_base() -> None:
    assert deterioration(2.2, 2.0, lower=True) == pytest.approx(0.1)
    assert deterioration(0.6, 0.8, lower=False) == pytest.approx(0.25)
    assert deterioration(0.9, 0.8, lower=False) < 0
    assert deterioration(0.0, 0.0, lower=True) == 0.0
    assert deterioration(0.1, 0.0, lower=True) == math.inf


def test_numbers_are_short() -> None:
    assert [size_in_words(n) for n in (None, 12, 2048, 5 * 2**20, 3 * 2**30)] == [
        *("—", "12 B", "2 KiB", "5 MiB", "3.0 GiB")
    ]
    assert [count_in_words(n) for n in (None, 7, 1500, 147_000, 2.5e6, 3e9)] == [
        *("—", "7", "1.5 k", "147 k", "2.5 M", "3 G")
    ]


def test_settings_are_written_without_brackets() -> None:
    assert setting_in_words([1, 2]) == "1, 2"
    assert setting_in_words({"symbols": 64, "distinct": False}) == "symbols = 64, distinct = False"
    assert setting_in_words({}) == "none"
    assert setting_in_words("rope") == "rope"
