"""The words of a report, their definitions and colours, and its numbers."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from posenc.lab.bench.report import WORDS
from posenc.lab.reporting import numbers
from posenc.lab.reporting.judge import GATES, Word, deterioration, word
from posenc.lab.reporting.opening import (
    TONES,
    Opening,
    Remedy,
    Verdict,
    Verdicts,
    length_words,
    meanings,
)
from posenc.lab.reporting.page import environment, source

OTHERS = {"learned", "same", "differs", "refuses", "unknown"}
USED = {*get_args(Word), *GATES, *WORDS.values(), *OTHERS}


def test_words_as_json() -> None:
    rows = (Verdict(name="a", words=("holds", "")), Verdict(name="b", words=("breaks", "unsure")))
    opened = Opening(
        headline="Use a",
        verdicts=Verdicts(title="", columns=("loss", "recall"), rows=rows),
        remedies=(Remedy(text="More:", command="posenc more"),),
    )
    wanted = {"loss": "holds", "recall": None}, {"loss": "breaks", "recall": "unsure"}
    remedies = [{"text": "More:", "command": "posenc more"}]
    verdicts = dict(zip("ab", wanted, strict=True))
    assert opened.to_json() == {"headline": "Use a", "verdicts": verdicts, "remedies": remedies}


def test_words_that_occur_are_defined_once() -> None:
    assert meanings(["b", "", "a", "b"], {"a": "A", "b": "B", "c": "C"}) == {"b": "B", "a": "A"}


def test_every_word_has_a_colour() -> None:
    assert set(TONES) == USED
    sheet = source(environment("posenc.lab.reporting"), "style.css")
    for tone in TONES.values():
        assert f".{tone}" in sheet


def test_definitions_are_held_to_the_limits() -> None:
    words = length_words("at 64")
    assert words["holds"] == "at most 5% worse than at 64"
    assert words["degrades"] == "5% to 25% worse than at 64"
    assert words["breaks"] == "more than 25% worse than at 64"


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
    assert word(numbers.Estimate(mean, half, 3)) == expected


def test_a_deterioration_is_a_share_of_the_base() -> None:
    assert deterioration(2.2, 2.0, lower=True) == pytest.approx(0.1)
    assert deterioration(0.6, 0.8, lower=False) == pytest.approx(0.25)
    assert deterioration(0.9, 0.8, lower=False) < 0
    assert deterioration(0.0, 0.0, lower=True) == 0.0
    assert deterioration(0.1, 0.0, lower=True) == math.inf


def test_numbers_are_short() -> None:
    assert [numbers.size_in_words(n) for n in (None, 12, 2048, 5 * 2**20, 3 * 2**30)] == [
        *("—", "12 B", "2 KiB", "5 MiB", "3.0 GiB")
    ]
    assert [numbers.count_in_words(n) for n in (None, 7, 1500, 147_000, 2.5e6, 3e9)] == [
        *("—", "7", "1.5 k", "147 k", "2.5 M", "3 G")
    ]


def test_settings_are_written_without_brackets() -> None:
    assert numbers.setting_in_words([1, 2]) == "1, 2"
    assert (
        numbers.setting_in_words({"symbols": 64, "distinct": False})
        == "symbols = 64, distinct = False"
    )
    assert numbers.setting_in_words({}) == "none"
    assert numbers.setting_in_words("rope") == "rope"


def test_interval_by_hand() -> None:
    # Student's t at 97.5 % with 2 degrees of freedom is 4.302653; sd 1, n 3.
    found = numbers.estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert numbers.estimate([]) is None
    single = numbers.estimate([5.0])
    assert single.half_width is None
    assert not single.sure


def test_pairs_cancel_what_seeds_share() -> None:
    a, b = {2: 9.0, 0: 1.0, 1: 5.0, 3: 2.0}, {0: 0.9, 1: 4.91, 2: 8.89, 7: 0.0}
    found = numbers.paired_difference(a, b)
    assert found.n == 3
    assert found.mean == pytest.approx(0.1, abs=1e-9)
    assert found.sure
    two = numbers.paired_difference({5: 1.0, 6: 2.0}, {6: 2.0, 5: 1.5})
    assert two.mean == -0.25
    assert two.half_width == pytest.approx(12.706205 * 0.25, abs=1e-6)
