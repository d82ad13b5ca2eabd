"""The effective length: its reference, interval and gates, and how often the interval is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from posenc.lab.evaluation.lengths import ANSWERS, Series, effective_length, next_length, rise
from posenc.lab.evaluation.results import Effective

LENGTHS = (16, 32, 64, 128, 256)
NOISE = [0.02 * ((7 * n) % 5 - 2) for n in range(60)]


def losses(*means: float) -> Series:
    values = {n: [mean + noise for noise in NOISE] for n, mean in zip(LENGTHS, means, strict=True)}
    return Series("loss", "loss", values, lower=True)


def bits(name: str = "loss", **values: tuple[float, float]) -> Series:
    """Losses by mean and by how far half of the pieces lie above and below it; ``n64=(2, 1)``."""
    pieces = {
        int(n[1:]): [mean + spread * (-1) ** k for k in range(60)]
        for n, (mean, spread) in values.items()
    }
    return Series(name, name, pieces, lower=True)


def shares(
    *found: float,
    name: str = "recall",
    group: str | None = None,
    count: int = 200,
    chance: float = 0.0,
    lengths: Sequence[int] = LENGTHS,
) -> Series:
    values = {
        n: [float(k < share * count) for k in range(count)]
        for n, share in zip(lengths, found, strict=True)
    }
    return Series(name, group or name, values, chance=chance)


def task(name: str, *found: float, **how: Any) -> Series:
    return shares(*found, name=name, group="questions", **how)


def effective(*series: Series, claimed: int = 32, margin: float = 0.05, **most: int) -> Effective:
    return effective_length(list(series), claimed=claimed, margin=margin, **most)


def check(*series: Series, claimed: int = 32, margin: float = 0.05, **expected: object) -> None:
    found = effective(*series, claimed=claimed, margin=margin)
    assert {name: getattr(found, name) for name in expected} == expected


FLAT, BREAKING = losses(2, 2, 2, 2, 2), losses(2.1, 2, 2, 2.03, 2.6)
RIGHT = (1, 1, 1, 1, 1)


def test_the_longest_within_the_margin_and_the_first_surely_beyond() -> None:
    check(BREAKING, length=128, low=128, end=256, reference=32, honest=True, limited_by="loss")
    check(BREAKING, margin=0.5, length=256, end=None, limited_by="")
    # a later recovery does not count, nor what may have been outside
    check(losses(2, 2, 2.6, 2, 2), length=32, end=64)
    check(bits(n32=(2, 0), n64=(2.15, 1), n128=(2, 0)), length=32, low=32, end=None)
    # the margin is a share of the value
    check(shares(0.5, 0.5, 0.43, 0.43, 0.43, count=2000), margin=0.1, end=64)


def test_one_ability_that_fails_ends_it() -> None:
    abilities = ("loss", "recall")
    failing = shares(1, 1, 1, 0.2, 0.1)
    check(FLAT, failing, length=64, end=128, limited_by="recall", abilities=abilities)
    # the first that left is named, also where none left surely
    first = bits("a", n32=(2, 0), n64=(2.15, 1), n128=(2, 0), n256=(2, 0))
    second = bits("b", n32=(2, 0), n64=(2, 0), n128=(2.3, 1), n256=(4, 0))
    check(first, second, length=32, end=256, limited_by="a")
    first = bits("a", n32=(2, 0), n64=(2.15, 1), n128=(2, 0))
    second = bits("b", n32=(2, 0), n64=(2, 0), n128=(2.3, 1))
    check(first, second, end=None, limited_by="a")
    # one that is surely outside counts beside one that may be further
    sure, unsure = bits("a", n32=(2, 0), n64=(2.4, 0)), bits("b", n32=(2, 0), n64=(2.7, 3))
    check(unsure, sure, end=64, limited_by="a")


def test_few_questions_leave_the_interval_open() -> None:
    few = shares(1, 1, 1, 0.9, 0.9, count=12)
    check(few, length=64, low=32, end=None, limited_by="recall")
    # all of twelve right may still be fewer than 95 % of all
    check(shares(*RIGHT, count=12), length=256, low=32, end=None)
    check(shares(*RIGHT, count=400), low=256, ceiling=True)
    check(shares(*RIGHT, name="a"), shares(1, 1, 1, 1, 0.98, name="b"), ceiling=False)


def test_what_is_at_chance_or_not_asked_at_every_length_does_not_count() -> None:
    guessed = shares(0.06, 0.06, 0.06, 0.0, 0.0, chance=1 / 16)
    check(FLAT, guessed, unlearned=("recall",), length=256, ceiling=False)
    check(shares(0.5, 0.5, 0.5, 0.5, 0.5), abilities=("recall",))
    for right, learned in ((2, ("recall",)), (1, ())):
        check(shares(right / 8, right / 8, count=8, lengths=(32, 64)), abilities=learned)
    check(FLAT, task("vt", 1, 0, lengths=(32, 64)), unlearned=("vt",), length=256)


def test_tasks_are_judged_together() -> None:
    both = {"length": 128, "end": 256, "abilities": ("vt", "cwe")}
    one, other = task("vt", 1, 1, 1, 1, 0.9, count=20), task("cwe", 1, 1, 1, 1, 0.1, count=20)
    check(one, other, limited_by="questions", **both)
    # one lacks shorter lengths
    check(task("vt", 1, 1, 1, 1, 0.2), task("cwe", 1, 1, 1, 0.2, lengths=LENGTHS[1:]), **both)


def test_far_less_loss_in_shorter_contexts_is_an_overstated_length() -> None:
    overstated = losses(2.1, 2, 4, 4, 4)
    check(overstated, claimed=128, reference=32, honest=False, length=32, end=64)
    # a little less is no proof; nor are shares, nor what is not sure
    check(losses(2.1, 2, 2.2, 2.2, 2.2), claimed=128, honest=True, reference=128)
    check(shares(1, 0.5, 0.5, 0.5, 0.5), honest=True)
    check(bits(n16=(2, 0), n32=(2.6, 3)), honest=True, reference=32)
    # the shorter length of least loss
    check(losses(2, 2.1, 4, 4, 4), claimed=64, margin=0.2, honest=False, reference=16)


def answers(*shares: float) -> Series:
    """Of 60 questions, as many right at each length."""
    values = {
        n: [float(k < 60 * share) for k in range(60)]
        for n, share in zip(LENGTHS, shares, strict=True)
    }
    return Series("task", ANSWERS, values)


def test_far_more_answers_in_shorter_contexts_are_an_overstated_length() -> None:
    """Where they were asked at every length; needles alone do not say so."""
    found = effective_length([answers(1.0, 1.0, 0.5, 0.1, 0.0)], claimed=128, margin=0.05)
    assert (found.honest, found.reference, found.length, found.end) == (False, 16, 32, 64)
    found = effective_length([answers(1.0, 0.95, 0.9, 0.85, 0.8)], claimed=128, margin=0.05)
    assert (found.honest, found.reference) == (True, 128)
    recall = replace(answers(1.0, 1.0, 0.5, 0.1, 0.0), group="recall")
    assert effective_length([recall], claimed=128, margin=0.05).honest
    some = answers(1.0, 1.0, 0.5, 0.1, 0.0)
    later = replace(some, values={n: v for n, v in some.values.items() if n >= 64})
    level = losses(2.0, 1.9, 1.8, 1.7, 1.6)
    assert effective_length([level, later], claimed=128, margin=0.05).honest


def test_the_claimed_length_need_not_be_measured() -> None:
    found = effective(FLAT, claimed=100)
    assert (found.reference, found.claimed, found.honest) == (64, 100, True)
    check(FLAT, claimed=8, reference=16, honest=True, length=256)
    cut = effective(FLAT, claimed=64, most=64)
    assert (cut.length, cut.end, cut.cut) == (64, None, 64)


def test_the_interval_is_halved_until_it_is_narrow() -> None:
    lengths, true = [32, 64, 128], 73
    for _ in range(9):
        values = {n: [2.0 + noise + (n > true) for noise in NOISE] for n in lengths}
        found = effective(Series("loss", "loss", values, lower=True))
        middle = next_length(found, lengths)
        if middle is None:
            break
        assert middle not in lengths
        lengths = sorted([*lengths, middle])
    assert found.length <= true < found.end <= 1.2 * found.length
    assert next_length(effective(FLAT), LENGTHS) is None


def test_the_next_length_is_above_all_that_were_measured_below() -> None:
    found = effective(bits(n32=(2, 0), n64=(2.15, 1), n128=(3, 0)))
    assert (found.length, found.end) == (32, 128)
    assert next_length(found, (32, 64, 128)) == 91
    near = effective(bits(n2=(2, 0), n3=(3, 0)), claimed=2)
    assert next_length(near, (2, 3)) is None, "no whole number is between"


def places(*means: float) -> Mapping[int, Sequence[float]]:
    return {16 * n: [mean + noise for noise in NOISE] for n, mean in enumerate(means)}


def test_where_the_loss_rises() -> None:
    for means, claimed, *expected in (
        ((2.5, 2, 2, 4, 4, 4, 4, 4), 64, 48, 2, 4),
        ((2, 2.3, 2.7, 2.7, 2.7), 64, 32, 2, 2.7),  # held to the least loss before it
        ((2.5, 2, 2, 4, 5, 5), 80, 48, 2, 4.5),  # the mean of all that follows
    ):
        found = rise(places(*means), claimed=claimed)
        assert [found.position, found.before, found.after] == pytest.approx(expected, abs=0.01)
    for means, claimed in (
        ((2.5, 2, 2, 2, 4, 4), 64),  # beyond what is stated
        ((2.5, 2, 4, 2, 2, 2), 64),  # a bump, no rise
        ((2.5, 2, 2.2, 2.2, 2.2), 64),  # too little
        ((), 64),
        ((2.5, 2, 2, 4, 4), 56),  # the place ends beyond it
    ):
        assert rise(places(*means), claimed=claimed) is None


@pytest.mark.parametrize(("share", "after"), [(0.9, 0.9), (0.9, 0.7), (1.0, 1.0), (0.6, 0.2)])
def test_the_interval_holds_the_true_length_in_19_of_20(share: float, after: float) -> None:
    """Needles drawn anew 400 times; where fewer are found beyond 64, that is the true length."""
    draw, right, repeats = random.Random(0), 0, 400
    breaks = after < 0.95 * share
    for _ in range(repeats):
        values = {
            n: [float(draw.random() < (share if n <= 64 else after)) for _ in range(160)]
            for n in LENGTHS
        }
        found = effective(Series("recall", "recall", values))
        true = 64 if breaks else 256
        right += found.low <= true and (found.end is None or true < found.end)
    assert right >= 0.95 * repeats
