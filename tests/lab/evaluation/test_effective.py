"""The effective length: its reference, interval and gates, and how often the interval is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from posenc.lab.evaluation.lengths import Series, effective_length, next_length, rise

LENGTHS = (16, 32, 64, 128, 256)
NOISE = [0.02 * ((7 * n) % 5 - 2) for n in range(60)]


def losses(*means: float) -> Series:
    values = {n: [mean + noise for noise in NOISE] for n, mean in zip(LENGTHS, means, strict=True)}
    return Series("loss", "loss", values, lower=True)


def shares(*found: float, name: str = "recall", count: int = 200, chance: float = 0.0) -> Series:
    values = {
        n: [float(k < share * count) for k in range(count)]
        for n, share in zip(LENGTHS, found, strict=True)
    }
    return Series(name, name, values, chance=chance)


def test_the_longest_within_the_margin_and_the_first_surely_beyond() -> None:
    found = effective_length([losses(2.1, 2, 2, 2.03, 2.6)], claimed=32, margin=0.05)
    assert (found.length, found.low, found.end) == (128, 128, 256)
    assert (found.reference, found.honest, found.limited_by) == (32, True, "loss")
    wide = effective_length([losses(2.1, 2, 2, 2.03, 2.6)], claimed=32, margin=0.5)
    assert (wide.length, wide.end, wide.limited_by) == (256, None, "")


def test_one_ability_that_fails_ends_it() -> None:
    found = effective_length(
        [losses(2, 2, 2, 2, 2), shares(1, 1, 1, 0.2, 0.1)], claimed=32, margin=0.05
    )
    assert (found.length, found.end, found.limited_by) == (64, 128, "recall")
    assert found.abilities == ("loss", "recall")


def test_a_later_recovery_does_not_count() -> None:
    found = effective_length([losses(2, 2, 2.6, 2, 2)], claimed=32, margin=0.05)
    assert (found.length, found.end) == (32, 64)


def test_few_questions_leave_the_interval_open() -> None:
    few = shares(1, 1, 1, 0.9, 0.9, count=12)
    found = effective_length([few], claimed=32, margin=0.05)
    assert (found.length, found.low, found.end) == (64, 32, None)
    assert found.limited_by == "recall"
    # all of twelve right may still be fewer than 95 % of all
    sure = effective_length([shares(1, 1, 1, 1, 1, count=12)], claimed=32, margin=0.05)
    assert (sure.length, sure.low, sure.end) == (256, 32, None)
    many = effective_length([shares(1, 1, 1, 1, 1, count=400)], claimed=32, margin=0.05)
    assert many.low == 256
    assert many.ceiling


def test_what_is_at_chance_does_not_count() -> None:
    guessed = shares(0.06, 0.06, 0.06, 0.0, 0.0, chance=1 / 16)
    found = effective_length([losses(2, 2, 2, 2, 2), guessed], claimed=32, margin=0.05)
    assert found.unlearned == ("recall",)
    assert found.length == 256
    assert not found.ceiling
    assert effective_length([shares(0.5, 0.5, 0.5, 0.5, 0.5)], claimed=32, margin=0.05).abilities


def test_what_was_not_asked_at_every_length_does_not_count() -> None:
    values = {32: [1.0] * 50, 64: [0.0] * 50}
    partial = Series("vt", "questions", values)
    found = effective_length([losses(2, 2, 2, 2, 2), partial], claimed=32, margin=0.05)
    assert found.unlearned == ("vt",)
    assert found.length == 256


def test_tasks_are_judged_together() -> None:
    one = Series("vt", "questions", shares(1, 1, 1, 1, 0.9, count=20).values)
    other = Series("cwe", "questions", shares(1, 1, 1, 1, 0.1, count=20).values)
    found = effective_length([one, other], claimed=32, margin=0.05)
    assert (found.length, found.end, found.limited_by) == (128, 256, "questions")
    assert found.abilities == ("vt", "cwe")


def test_far_less_loss_in_shorter_contexts_is_an_overstated_length() -> None:
    found = effective_length([losses(2.1, 2, 4, 4, 4)], claimed=128, margin=0.05)
    assert (found.reference, found.honest) == (32, False)
    assert (found.length, found.end) == (32, 64)
    slight = effective_length([losses(2.1, 2, 2.2, 2.2, 2.2)], claimed=128, margin=0.05)
    assert slight.honest, "a little less is no proof"
    assert slight.reference == 128


def test_the_claimed_length_need_not_be_measured() -> None:
    found = effective_length([losses(2, 2, 2, 2, 2)], claimed=100, margin=0.05)
    assert (found.reference, found.claimed, found.honest) == (64, 100, True)


def test_what_is_cut_is_not_read() -> None:
    found = effective_length([losses(2, 2, 2, 2, 2)], claimed=64, margin=0.05, most=64)
    assert (found.length, found.end, found.cut) == (64, None, 64)


def test_the_interval_is_halved_until_it_is_narrow() -> None:
    lengths, true = [32, 64, 128], 73
    for _ in range(9):
        values = {n: [2.0 + noise + (n > true) for noise in NOISE] for n in lengths}
        found = effective_length(
            [Series("loss", "loss", values, lower=True)], claimed=32, margin=0.05
        )
        middle = next_length(found, lengths)
        if middle is None:
            break
        assert middle not in lengths
        lengths = sorted([*lengths, middle])
    assert found.end is not None
    assert found.length <= true < found.end
    assert found.end <= 1.2 * found.length
    held = effective_length([losses(2, 2, 2, 2, 2)], claimed=32, margin=0.05)
    assert next_length(held, LENGTHS) is None


def bits(name: str = "loss", **values: tuple[float, float]) -> Series:
    """Losses by mean and by how far half of the pieces lie above and below it; ``n64=(2, 1)``."""
    pieces = {
        int(n[1:]): [mean + spread * (-1) ** k for k in range(60)]
        for n, (mean, spread) in values.items()
    }
    return Series(name, name, pieces, lower=True)


def test_what_may_have_been_outside_is_not_within_further_on() -> None:
    found = effective_length(
        [bits(n32=(2.0, 0), n64=(2.15, 1), n128=(2.0, 0))], claimed=32, margin=0.05
    )
    assert (found.length, found.low, found.end) == (32, 32, None)


def test_the_first_ability_that_left_is_named() -> None:
    two = [
        bits("a", n32=(2.0, 0), n64=(2.15, 1), n128=(2.0, 0), n256=(2.0, 0)),
        bits("b", n32=(2.0, 0), n64=(2.0, 0), n128=(2.3, 1), n256=(4.0, 0)),
    ]
    found = effective_length(two, claimed=32, margin=0.05)
    assert (found.length, found.end, found.limited_by) == (32, 256, "a")
    unsure = effective_length(
        [
            Series(one.name, one.group, {n: one.values[n] for n in (32, 64, 128)}, True)
            for one in two
        ],
        claimed=32,
        margin=0.05,
    )
    assert (unsure.end, unsure.limited_by) == (None, "a")


def test_one_that_is_surely_outside_counts_beside_one_that_may_be_further() -> None:
    sure = bits("a", n32=(2.0, 0), n64=(2.4, 0))
    unsure = bits("b", n32=(2.0, 0), n64=(2.7, 3))
    found = effective_length([unsure, sure], claimed=32, margin=0.05)
    assert (found.end, found.limited_by) == (64, "a")


def test_the_margin_is_a_share_of_the_value() -> None:
    found = effective_length(
        [shares(0.5, 0.5, 0.43, 0.43, 0.43, count=2000)], claimed=32, margin=0.1
    )
    assert found.end == 64


def test_two_of_eight_are_more_than_by_chance_and_one_is_not() -> None:
    for right, learned in ((2, ("recall",)), (1, ())):
        values = {n: [1.0] * right + [0.0] * (8 - right) for n in (32, 64)}
        found = effective_length([Series("recall", "recall", values)], claimed=32, margin=0.05)
        assert found.abilities == learned


def test_everything_must_be_right_for_a_ceiling() -> None:
    two = [shares(1, 1, 1, 1, 1, name="a"), shares(1, 1, 1, 1, 0.98, name="b")]
    assert not effective_length(two, claimed=32, margin=0.05).ceiling


def test_without_a_length_up_to_the_claimed_one_the_shortest_is_the_reference() -> None:
    found = effective_length([losses(2, 2, 2, 2, 2)], claimed=8, margin=0.05)
    assert (found.reference, found.honest, found.length) == (16, True, 256)


def test_a_task_that_lacks_shorter_lengths_is_joined_to_the_others() -> None:
    values = shares(1, 1, 1, 1, 0.2).values
    whole = Series("vt", "questions", values)
    partial = Series("cwe", "questions", {n: v for n, v in values.items() if n > 16})
    found = effective_length([whole, partial], claimed=32, margin=0.05)
    assert (found.length, found.end, found.abilities) == (128, 256, ("vt", "cwe"))


def test_an_overstated_length_shows_in_losses_and_surely() -> None:
    recall = shares(1, 0.5, 0.5, 0.5, 0.5)
    assert effective_length([recall], claimed=32, margin=0.05).honest
    unsure = effective_length([bits(n16=(2.0, 0), n32=(2.6, 3))], claimed=32, margin=0.05)
    assert (unsure.honest, unsure.reference) == (True, 32)
    found = effective_length([losses(2, 2.1, 4, 4, 4)], claimed=64, margin=0.2)
    assert (found.honest, found.reference) == (False, 16), "the shorter length of least loss"


def test_the_next_length_is_above_all_that_were_measured_below() -> None:
    found = effective_length(
        [bits(n32=(2.0, 0), n64=(2.15, 1), n128=(3.0, 0))], claimed=32, margin=0.05
    )
    assert (found.length, found.end) == (32, 128)
    assert next_length(found, (32, 64, 128)) == 91
    near = effective_length([bits(n2=(2.0, 0), n3=(3.0, 0))], claimed=2, margin=0.05)
    assert next_length(near, (2, 3)) is None, "no whole number is between"


def places(*means: float) -> Mapping[int, Sequence[float]]:
    return {16 * n: [mean + noise for noise in NOISE] for n, mean in enumerate(means)}


def test_where_the_loss_rises() -> None:
    found = rise(places(2.5, 2, 2, 4, 4, 4, 4, 4), claimed=64)
    assert found is not None
    assert found.position == 48
    assert (found.before, found.after) == (pytest.approx(2, abs=0.01), pytest.approx(4, abs=0.01))
    assert rise(places(2.5, 2, 2, 2, 4, 4), claimed=64) is None, "beyond what is stated"
    assert rise(places(2.5, 2, 4, 2, 2, 2), claimed=64) is None, "a bump, no rise"
    assert rise(places(2.5, 2, 2.2, 2.2, 2.2), claimed=64) is None, "too little"
    assert rise({}, claimed=64) is None
    assert rise(places(2.5, 2, 2, 4, 4), claimed=56) is None, "the place ends beyond it"
    steps = rise(places(2, 2.3, 2.7, 2.7, 2.7), claimed=64)
    assert steps is not None, "held to the least loss before it"
    assert (steps.position, steps.before) == (32, pytest.approx(2, abs=0.01))
    more = rise(places(2.5, 2, 2, 4, 5, 5), claimed=80)
    assert more is not None
    assert more.after == pytest.approx(4.5, abs=0.01), "the mean of all that follows"


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
        found = effective_length([Series("recall", "recall", values)], claimed=32, margin=0.05)
        true = 64 if breaks else 256
        right += found.low <= true and (found.end is None or true < found.end)
    assert right >= 0.95 * repeats
