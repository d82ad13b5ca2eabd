"""Verdicts and ranks of a comparison, and its answer in words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.summary import Summary, summarise
from tests.support.samples import ACCURACY, LOSS, sample


def row_of(summary: Summary, name: str):  # type: ignore[no-untyped-def]
    return next(row for row in summary.rows if row.subject.name == name)


def test_verdicts_and_order() -> None:
    summary = summarise(sample())
    verdicts = {row.subject.name: row.verdict for row in summary.rows}
    assert verdicts["alibi"] == "holds"
    assert verdicts["t5"] == "degrades"
    assert verdicts["rope"] == verdicts["sinusoidal"] == "breaks"
    assert verdicts["learned"] == "untestable"
    assert [row.subject.name for row in summary.rows][:2] == ["rope|window=64", "alibi"]
    assert summary.rows[-1].subject.name == "learned"
    assert summary.rows[-1].rank is None
    assert [row.rank for row in summary.rows[:-1]] == [1, 2, 3, 4, 5, 6]


def test_subjects_that_cannot_be_told_apart_share_a_rank() -> None:
    base = sample()
    other = base.values("alibi", "loss", 512)
    changed = tuple(
        replace(m, value=other[m.seed] + (0.01 if m.seed == 1 else -0.004))
        if (m.subject, m.metric, m.x) == ("t5", "loss", 512)
        else m
        for m in base.measurements
    )
    summary = summarise(replace(base, measurements=changed))
    assert row_of(summary, "t5").rank == row_of(summary, "alibi").rank == 2
    assert any("do not tell apart" in sentence for sentence in summary.answer)


def test_the_answer_names_what_matters() -> None:
    text = " ".join(summarise(sample()).answer)
    for words in (
        "alibi holds up at 512 tokens, 8 times the training length",
        "rope and sinusoidal break",
        "The baseline rope (window 64)",
        "beaten by no candidate",
        "learned could not be tested at 128: the learned table ends",
        "95 % intervals over 3 seeds",
    ):
        assert words in text


def test_higher_can_be_better() -> None:
    summary = summarise(sample(metric=ACCURACY))
    assert summary.rows[0].subject.name in ("rope|window=64", "alibi")
    assert row_of(summary, "sinusoidal").verdict == "breaks"
    change = row_of(summary, "sinusoidal").change
    assert change is not None
    assert change.mean > 0


def test_shares_are_told_in_percent() -> None:
    text = " ".join(summarise(sample(metric=ACCURACY)).answer)
    assert "alibi holds up" in text
    assert "points ahead of" in text
    assert re.search(r"% \(\S+ to \S+\) of sequences at 512 tokens", text)
    symbols = replace(sample(metric=ACCURACY), length_unit="symbols")
    assert "at 512 symbols, 8 times" in " ".join(summarise(symbols).answer)


def test_what_did_not_learn_is_not_judged_by_length() -> None:
    metric = replace(ACCURACY, learned=0.8)
    summary = summarise(sample(metric=metric))
    assert row_of(summary, "nope").verdict == "unlearned"
    assert row_of(summary, "rope").verdict != "unlearned"
    (sentence,) = [text for text in summary.answer if text.startswith("Not learned")]
    assert "nope 6" in sentence
    assert "rope " not in sentence
    loss = replace(LOSS, learned=3.0)
    assert row_of(summarise(sample(metric=loss)), "nope").verdict == "unlearned"
    assert row_of(summarise(sample(metric=loss)), "alibi").verdict == "holds"


def test_one_seed_says_that_it_cannot_be_sure() -> None:
    summary = summarise(sample(seeds=(0,)))
    assert "One seed only" in summary.answer[-1]
    assert all(value.half_width is None for row in summary.rows for value in row.values.values())


def test_one_length_and_interrupted_and_empty() -> None:
    assert "the only one tested" in summarise(sample(lengths=(64,))).answer[0]
    assert "interrupted" in summarise(sample(complete=False)).answer[0]
    nothing = replace(sample(complete=False), measurements=(), runs=())
    assert "Nothing has been measured yet." in summarise(nothing).answer


def test_why_nothing_could_be_measured() -> None:
    base, reason = sample(), "training of seed 0 diverged"
    refused = tuple(
        RefusedMeasurement(subject=subject.name, metric="loss", x=x, reason=reason)
        for subject in base.subjects
        for x in base.test_lengths
    )
    summary = summarise(replace(base, measurements=(), refusals=refused))
    assert summary.headline == "None of the 5 could be tested"
    first, beyond = summary.answer
    assert "alibi" in first
    assert first.endswith(f"could not be tested at 64: {reason}.")
    assert beyond == f"Nothing could be tested at 128: {reason}."


def test_values_beyond_measure_do_not_divide_by_zero() -> None:
    base = sample(metric=ACCURACY)
    zero = tuple(
        replace(m, value=0.0) if isinstance(m, Measurement) and m.subject == "rope" else m
        for m in base.measurements
    )
    assert row_of(summarise(replace(base, measurements=zero)), "rope") is not None


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_change_from_nothing_is_no_percentage(better: str) -> None:
    """A BLEU of 0, or no errors at all, at the training length."""
    base = sample(metric=replace(LOSS, lower_is_better=better == "lower", trivial=None))
    none = tuple(
        replace(m, value=0.0)
        if (m.subject, m.metric, m.x) == ("rope", "loss", base.train_length)
        else m
        for m in base.measurements
    )
    answer = " ".join(summarise(replace(base, measurements=none)).answer)
    assert "inf" not in answer
    assert "nan" not in answer
    assert "0 → 3.9" in answer


def test_what_is_said_of_seeds_is_what_was_done() -> None:
    """A comparison of three seeds, interrupted after the first."""
    base = sample(complete=False)
    first = replace(
        base,
        runs=tuple(run for run in base.runs if run.seed == 0),
        measurements=tuple(m for m in base.measurements if m.seed == 0),
    )
    assert first.most_seeds == 1
    assert summarise(first).answer[-1].startswith("One seed only")
    assert "up to 3 seeds" in summarise(base).answer[-1]
    assert "over 3 seeds" in summarise(sample()).answer[-1]


def test_the_answer_says_how_far_it_held_and_the_unit_once() -> None:
    answer = summarise(sample()).answer
    broken = next(sentence for sentence in answer if "break at 512" in sentence)
    assert "holds up to 128, " in broken  # rope
    assert broken.count("bits per byte") == 1
    assert broken.count("holds up to") == 1  # sinusoids do not, further than they were trained


def test_the_answer_is_about_lengths_that_were_tested() -> None:
    """No text had sentences as long as the longest length: nothing was measured there."""
    base = sample()
    measured = tuple(m for m in base.measurements if m.x != 512 or m.metric != "loss")
    reason = "no sentence is as long"
    refused = tuple(
        RefusedMeasurement(subject=s.name, metric="loss", x=512, reason=reason)
        for s in base.subjects
    )
    answer = summarise(replace(base, measurements=measured, refusals=refused)).answer
    assert any("at 256 tokens, 4 times the training length" in said for said in answer)
    assert any(said.startswith("Best at 256 ") for said in answer)
    assert f"Nothing could be tested at 512: {reason}." in answer
    assert sum("512" in said for said in answer) == 3  # the learned table, and needles


def test_large_changes_are_told_as_multiples() -> None:
    base = sample()
    tiny = tuple(
        replace(m, value=0.006 * (1 + m.seed / 10))
        if (m.subject, m.metric, m.x) == ("rope", "loss", base.train_length)
        else m
        for m in base.measurements
    )
    answer = " ".join(summarise(replace(base, measurements=tiny)).answer)
    assert re.search(
        r"rope 0\.00660 → 3\.\d+ bits per byte, \d+ \(\d+ to \d+\) times as much", answer
    ), answer
