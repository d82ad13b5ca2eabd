"""Verdicts and ranks of a comparison, and its answer in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from posenc.lab.experiments.report import numbers
from posenc.lab.experiments.results import Comparison, Measurement, RefusedMeasurement
from posenc.lab.experiments.summary import Summary, summarise
from posenc.lab.experiments.tasks.common.task import seen
from posenc.lab.experiments.verdicts import Row
from posenc.lab.reporting.judge import GATES
from tests.support.samples import ACCURACY, LOSS, RECALL, TRAINING, altered, sample

GATED = replace(LOSS, learned=3.8, rule="the byte before alone", overfit=0.5)


def row_of(summary: Summary, name: str) -> Row:
    return next(row for row in summary.rows if row.subject.name == name)


def said(comparison: Comparison) -> str:
    return " ".join(summarise(comparison).answer)


def sentence(comparison: Comparison, part: str) -> str:
    (only,) = [text for text in summarise(comparison).answer if part in text]
    return only


def gated(
    comparison: Comparison, metric: object = GATED, known: object = None, **seen_at: float
) -> Comparison:
    """With levels to reach, and with losses on known data, each 0.01 more a seed."""
    records = (
        Measurement(subject=name, seed=seed, metric="seen", x=64, value=value + 0.01 * seed)
        for name, value in seen_at.items()
        for seed in (0, 1, 2)
    )
    finding = replace(RECALL, learned=0.5)
    return replace(
        comparison,
        metrics=(metric, finding, TRAINING, known or seen(metric)),
        measurements=(*comparison.measurements, *records),
    )


def with_recall(**shares: tuple[float, ...]) -> Comparison:
    """Needles found at 64 and beyond; one share a seed at 512 if there are four, else the same."""

    def value(m: Measurement) -> float:
        at_train, *beyond = shares.get(m.subject, (0.98, 0.98))
        return at_train if m.x == 64 else beyond[m.seed % len(beyond)]

    return gated(altered(sample(), value, metric="recall"))


def test_verdicts_and_order() -> None:
    summary = summarise(sample())
    verdicts = {row.subject.name: row.verdict for row in summary.rows}
    assert verdicts["alibi"] == "holds"
    assert verdicts["t5"] == "degrades"
    assert verdicts["rope"] == verdicts["sinusoidal"] == "breaks"
    assert verdicts["learned"] == "untestable"
    names = [row.subject.name for row in summary.rows]
    assert (names[:2], names[-1]) == (["rope|window=64", "alibi"], "learned")
    assert [row.rank for row in summary.rows] == [1, 2, 3, 4, 5, 6, None]
    assert {row.verdict for row in summarise(sample(lengths=(64,))).rows} == {"learned"}


def test_subjects_that_cannot_be_told_apart_share_a_rank() -> None:
    other = sample().values("alibi", "loss", 512)
    base = altered(
        sample(), lambda m: other[m.seed] + (0.01 if m.seed == 1 else -0.004), "t5", "loss", 512
    )
    summary = summarise(base)
    assert row_of(summary, "t5").rank == row_of(summary, "alibi").rank == 2
    assert row_of(summary, "t5").behind is not None


def test_higher_can_be_better() -> None:
    """Shares are told in percent."""
    base = sample(metric=ACCURACY)
    summary = summarise(base)
    assert summary.rows[0].subject.name in ("rope|window=64", "alibi")
    assert row_of(summary, "sinusoidal").verdict == "breaks"
    assert row_of(summary, "sinusoidal").change.mean > 0
    assert row_of(summary, "alibi").verdict == "holds"
    assert row_of(summary, "sinusoidal").behind.mean > 0


def test_what_has_not_learned_has_no_verdict() -> None:
    """Twenty steps: losses at the entropy of single bytes, level with the control."""
    few = gated(altered(sample(), lambda m: 4.95 + 0.01 * m.seed, metric="loss"))
    few = replace(few, provenance=replace(few.provenance, settings={"steps": 20}))
    assert {(row.verdict, row.rank) for row in summarise(few).rows} == {("unlearned", None)}
    assert "(the byte before alone: 3.8; byte frequencies: 4.9)" in said(few)
    some = sample(metric=replace(ACCURACY, learned=0.8))
    text = sentence(some, "Not learned")
    assert "nope 6" in text
    assert "rope " not in text


def test_an_overfitted_run_has_no_verdict() -> None:
    """Held out 2.9 bits at every length, 0.4 on the text it was trained on."""
    found = gated(with_recall(), alibi=0.4, t5=2.7)
    rows = summarise(found)
    assert row_of(rows, "alibi").verdict == "overfitted"
    assert row_of(rows, "t5").verdict == "degrades", "a little less on known files is no sin"
    text = sentence(found, "overfitted")
    assert "alibi 2.9" in text
    assert "0.410 (0.385 to 0.435) bits per byte on what it was trained on" in text
    metric = replace(GATED, learned=4.27, trivial=5.32)
    known = seen(metric, learned=4.2, trivial=4.9)
    other = gated(altered(sample(), 3.0, "alibi", "loss"), metric, known, alibi=2.3)
    assert "(the byte before alone: 4.27 and 4.2)" in sentence(other, "overfitted")
    free = replace(metric, learned=None)
    other = gated(altered(sample(), 3.0, "alibi", "loss"), free, known, alibi=2.3)
    assert "4.2" not in sentence(other, "overfitted")


def test_what_is_level_with_the_control_has_no_verdict() -> None:
    control = {x: sample().values("nope", "loss", x) for x in (64, 512)}
    base = with_recall()
    for x in (64, 512):
        assert row_of(summarise(base), "alibi").tied_with is None, "better at 512"
        base = altered(
            base, lambda m: control[m.x][m.seed] + (0.01, -0.02, 0.005)[m.seed], "alibi", "loss", x
        )
    assert row_of(summarise(base), "alibi").verdict == "tied"
    assert sentence(base, "cannot be told from nope").startswith("No verdict on alibi")


def test_the_verdict_weighs_what_it_finds() -> None:
    """A flat loss with needles lost breaks; seeds that do not agree say nothing."""
    shares = {"alibi": (0.98, 0.1, 0.55, 0.98), "t5": (1.0, 1.0), "rope|window=64": (1.0, 0.06)}
    found = with_recall(**shares)
    rows = {row.subject.name: row for row in summarise(found).rows}
    assert {
        name: (rows[name].predicts, rows[name].finds, rows[name].verdict) for name in shares
    } == {
        "alibi": ("holds", "unsure", "unsure"),
        "t5": ("degrades", "holds", "degrades"),
        "rope|window=64": ("holds", "breaks", "breaks"),
    }
    answer = said(found)
    assert (
        "Unsure: alibi, whose seeds do not agree: 98.0% (98.0 to 98.0) of needles → "
        "54.3% (0.0 to 100.0) of needles at 512" in answer
    )
    assert rows["t5"].recall[512].shown(".1%") == "100.0% (100.0 to 100.0)"


def test_needles_that_were_never_found_do_not_show_a_longer_context_in_use() -> None:
    found = with_recall(alibi=(0.1, 0.1), rope=(0.1, 0.1))
    alibi = row_of(summarise(found), "alibi")
    assert (alibi.finds, alibi.verdict) == ("unlearned", "unsure")
    assert row_of(summarise(found), "rope").verdict == "breaks"
    assert "has not learned to find anything: 10.0%" in sentence(found, "Unsure: alibi")


def test_one_length_and_one_seed_and_empty() -> None:
    assert summarise(sample(lengths=(64,))).answer == ()
    nothing = replace(sample(complete=False), measurements=(), runs=())
    assert {row.verdict for row in summarise(nothing).rows} == {"unfinished"}
    one = summarise(sample(seeds=(0,)))
    assert all(value.half_width is None for row in one.rows for value in row.values.values())


def test_interrupted_comparisons_say_what_was_done() -> None:
    """After the first seed, or the first subject, whose others are not called untestable."""
    base = sample(complete=False)

    def only(**fields: object) -> Comparison:
        def kept(records: tuple[object, ...]) -> tuple[object, ...]:
            return tuple(r for r in records if fields.items() <= vars(r).items())

        return replace(base, runs=kept(base.runs), measurements=kept(base.measurements))

    assert only(seed=0).most_seeds == 1
    alibi = replace(only(subject="alibi"), refusals=())
    verdicts = {row.subject.name: row.verdict for row in summarise(alibi).rows}
    assert verdicts.pop("alibi") == "holds"
    assert set(verdicts.values()) == {"unfinished"}
    assert sentence(alibi, "Not finished: ").count(",") == len(verdicts) - 2


def refusals(comparison: Comparison, reason: str, *lengths: int) -> tuple[RefusedMeasurement, ...]:
    return tuple(
        RefusedMeasurement(subject=subject.name, metric="loss", x=x, reason=reason)
        for subject in comparison.subjects
        for x in lengths
    )


def test_why_nothing_could_be_measured() -> None:
    base, reason = sample(), "training of seed 0 diverged"
    refused = refusals(base, reason, *base.test_lengths)
    summary = summarise(replace(base, measurements=(), refusals=refused))
    assert summary.headline == "None of the 5 could be tested"
    first, beyond = summary.answer
    assert "alibi" in first
    assert first.endswith(f"could not be tested at 64: {reason}.")
    assert beyond == f"Nothing could be tested at 128: {reason}."


def test_the_answer_is_about_lengths_that_were_tested() -> None:
    """No text had sentences as long as the longest length: nothing was measured there."""
    base, reason = sample(), "no sentence is as long"
    measured = tuple(m for m in base.measurements if m.x != 512 or m.metric != "loss")
    found = replace(base, measurements=measured, refusals=refusals(base, reason, 512))
    summary = summarise(found)
    assert "at 4 × the trained length" in summary.headline
    assert f"Nothing could be tested at 512: {reason}." in summary.answer


def test_numbers_for_other_programs(tmp_path: Path) -> None:
    comparison = with_recall(t5=(1.0, 1.0))
    found = numbers(comparison, summarise(comparison), out=tmp_path)
    assert json.loads(json.dumps(found)) == found
    by_name = {record["name"]: record for record in found}
    t5, at_512 = by_name["t5"], by_name["t5"]["lengths"]["512"]
    assert (t5["verdict"], t5["gate"]) == ("degrades", None)
    assert (at_512["loss"]["n"], at_512["loss"]["mean"]) == (3, pytest.approx(3.26, abs=0.03))
    assert at_512["recall"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 3}
    assert t5["models"][0] == str(tmp_path / "runs/t5/seed-0/model")
    assert by_name["rope|window=64"]["models"][0] == str(tmp_path / "runs/rope/seed-0/model")
    learned = by_name["learned"]
    assert learned["gate"] == "untestable" in GATES
    assert "the learned table ends" in learned["reason"]
    assert learned["lengths"]["512"]["loss"] is None
    assert "table ends" in learned["lengths"]["512"]["refusal"]
