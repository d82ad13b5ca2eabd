"""Gates before a verdict: learned, overfitted, tied with the control, finished; recall beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from posenc.lab.experiments.report import numbers
from posenc.lab.experiments.results import Comparison, Measurement
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.summary import Summary, summarise
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.tasks.common.task import seen
from posenc.lab.experiments.verdicts import GATES, Row
from tests.support.samples import LOSS, RECALL, TRAINING, sample

GATED = replace(LOSS, learned=3.8, rule="the byte before alone", overfit=0.5)
FINDING = replace(RECALL, learned=0.5)


def row_of(summary: Summary, name: str) -> Row:
    return next(row for row in summary.rows if row.subject.name == name)


def changed(comparison: Comparison, change: Callable[[Measurement], float]) -> Comparison:
    """The same with other values."""
    return replace(
        comparison,
        measurements=tuple(replace(m, value=change(m)) for m in comparison.measurements),
        metrics=(GATED, FINDING, TRAINING, seen(GATED)),
    )


def with_recall(**shares: tuple[float, ...]) -> Comparison:
    """Needles found at 64 and beyond; one share a seed at 512 if there are four, else the same."""

    def value(m: Measurement) -> float:
        if m.metric != "recall":
            return m.value
        at_train, *beyond = shares.get(m.subject, (0.98, 0.98))
        if m.x == 64:
            return at_train
        return beyond[m.seed % len(beyond)]

    return changed(sample(), value)


def few_steps() -> Comparison:
    """Twenty steps: losses at the entropy of single bytes, level with the control."""

    def value(m: Measurement) -> float:
        if m.metric == "loss":
            return 4.95 + 0.01 * m.seed + 0.001 * (hash_of(m.subject) % 7)
        return 1 / 16 if m.metric == "recall" else m.value

    found = changed(sample(), value)
    provenance = replace(found.provenance, settings={"steps": 20})
    return replace(found, provenance=provenance)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def test_what_has_not_learned_has_no_verdict() -> None:
    summary = summarise(few_steps())
    answer = " ".join(summary.answer)
    assert {row.verdict for row in summary.rows} == {"unlearned"}
    assert {row.rank for row in summary.rows} == {None}
    assert "hold" not in answer
    assert "Best at" not in answer
    assert "(the byte before alone: 3.8; byte frequencies: 4.9)" in answer
    assert "Train longer (--steps 600; these had 20)" in answer


def test_the_trivial_level_is_a_gate_where_a_task_states_no_level() -> None:
    """A mean below that level whose interval reaches it has not learned either."""
    metric = replace(LOSS, learned=None, trivial=3.5)

    def spread(width: float) -> Comparison:
        return replace(
            changed(
                sample(),
                lambda m: (
                    m.value + width * (m.seed - 1)
                    if (m.subject, m.metric) == ("alibi", "loss")
                    else m.value
                ),
            ),
            metrics=(metric, TRAINING),
        )

    assert row_of(summarise(spread(0.0)), "alibi").verdict == "holds"
    assert row_of(summarise(spread(0.6)), "alibi").verdict == "unlearned"


def test_an_overfitted_run_has_no_verdict() -> None:
    """Held out 2.9 bits at every length, 0.4 on the text it was trained on."""
    base = with_recall()
    known = [
        Measurement(subject="alibi", seed=seed, metric="seen", x=64, value=0.4 + 0.01 * seed)
        for seed in (0, 1, 2)
    ] + [Measurement(subject="t5", seed=seed, metric="seen", x=64, value=2.7) for seed in (0, 1, 2)]
    summary = summarise(replace(base, measurements=(*base.measurements, *known)))
    assert row_of(summary, "alibi").verdict == "overfitted"
    assert row_of(summary, "t5").verdict == "degrades", "a little less on known files is no sin"
    (sentence,) = [text for text in summary.answer if "overfitted" in text]
    assert "alibi 2.9" in sentence
    assert "0.410 (0.385 to 0.435) bits per byte on what it was trained on" in sentence
    assert "--steps 150; these had 600" in sentence
    assert not any("alibi holds" in text for text in summary.answer)


def seen_at(loss: float, seen_level: float, *, kept: float) -> Comparison:
    """alibi with these losses; byte pairs give 4.27 held out and ``seen_level`` on known data."""
    metric = replace(GATED, learned=4.27, trivial=5.32)
    base = changed(
        sample(),
        lambda m: kept + 0.01 * m.seed if (m.subject, m.metric) == ("alibi", "loss") else m.value,
    )
    known = [
        Measurement(subject="alibi", seed=seed, metric="seen", x=64, value=loss + 0.01 * seed)
        for seed in range(3)
    ]
    metrics = (metric, FINDING, seen(metric, learned=seen_level, trivial=4.9))
    return replace(base, metrics=metrics, measurements=(*base.measurements, *known))


def test_an_untrained_run_is_not_called_overfitted() -> None:
    """Random weights cost 0.7 bits less on known text of another kind: that is the text's doing."""
    summary = summarise(seen_at(6.3, 3.55, kept=7.0))
    assert row_of(summary, "alibi").verdict == "unlearned"
    answer = " ".join(summary.answer)
    assert "overfitted" not in answer
    assert "Train longer" in answer


def test_the_gap_of_the_data_is_no_overfitting() -> None:
    assert row_of(summarise(seen_at(2.3, 3.6, kept=3.0)), "alibi").predicts == "holds"
    summary = summarise(seen_at(2.3, 4.2, kept=3.0))
    assert row_of(summary, "alibi").verdict == "overfitted"
    (sentence,) = [text for text in summary.answer if "overfitted" in text]
    assert "(the byte before alone: 4.27 and 4.2)" in sentence


def test_known_data_learned_by_heart_is_overfitted_without_a_margin() -> None:
    base = with_recall()
    metric = replace(GATED, learned=2.0, overfit=None)
    known = [
        Measurement(subject="alibi", seed=seed, metric="seen", x=64, value=1.9) for seed in range(3)
    ]
    found = replace(base, metrics=(metric,), measurements=(*base.measurements, *known))
    assert row_of(summarise(found), "alibi").verdict == "overfitted"
    assert row_of(summarise(found), "t5").verdict == "unlearned"


def test_what_is_level_with_the_control_has_no_verdict() -> None:
    base = with_recall()
    control = {
        (seed, x): base.values("nope", "loss", x)[seed] for seed in (0, 1, 2) for x in (64, 512)
    }

    def level(*lengths: float) -> Comparison:
        return changed(
            base,
            lambda m: (
                control[m.seed, m.x] + (0.01, -0.02, 0.005)[m.seed]
                if (m.subject, m.metric) == ("alibi", "loss") and m.x in lengths
                else m.value
            ),
        )

    tied = summarise(level(64, 512))
    assert row_of(tied, "alibi").verdict == "tied"
    (sentence,) = [text for text in tied.answer if "cannot be told from nope" in text]
    assert sentence.startswith("No verdict on alibi")
    assert row_of(summarise(level(64)), "alibi").tied_with is None, "better at 512"
    one = sample(seeds=(0,))
    nope = {x: one.values("nope", "loss", x)[0] for x in one.test_lengths}
    same = tuple(
        replace(m, value=1.01 * nope[int(m.x)]) if (m.subject, m.metric) == ("alibi", "loss") else m
        for m in one.measurements
    )
    assert row_of(summarise(replace(one, measurements=same)), "alibi").verdict == "tied"


def test_the_verdict_weighs_what_it_finds() -> None:
    """A flat loss with needles lost breaks; seeds that do not agree say nothing."""
    summary = summarise(
        with_recall(alibi=(0.98, 0.1, 0.55, 0.98), t5=(1.0, 1.0), **{"rope|window=64": (1.0, 0.06)})
    )
    alibi = row_of(summary, "alibi")
    assert (alibi.predicts, alibi.finds, alibi.verdict) == ("holds", "unsure", "unsure")
    t5 = row_of(summary, "t5")
    assert (t5.predicts, t5.finds, t5.verdict) == ("degrades", "holds", "degrades")
    window = row_of(summary, "rope|window=64")
    assert (window.predicts, window.finds, window.verdict) == ("holds", "breaks", "breaks")
    answer = " ".join(summary.answer)
    assert (
        "Unsure: alibi, whose seeds do not agree: 98.0% (98.0 to 98.0) of needles → "
        "54.3% (0.0 to 100.0) of needles at 512" in answer
    )
    (found,) = [text for text in summary.answer if text.startswith("Needles found at 512 tokens: ")]
    assert "t5 100.0% (100.0 to 100.0)" in found
    assert "alibi 54.3% (0.0 to 100.0)" in found
    assert "100% → 100% (100 to 100) of needles found" in answer
    assert "in what it predicts" in answer


def test_needles_that_were_never_found_do_not_show_a_longer_context_in_use() -> None:
    summary = summarise(with_recall(alibi=(0.1, 0.1), rope=(0.1, 0.1)))
    alibi = row_of(summary, "alibi")
    assert (alibi.finds, alibi.verdict) == ("unlearned", "unsure")
    assert row_of(summary, "rope").verdict == "breaks"
    (sentence,) = [text for text in summary.answer if text.startswith("Unsure: alibi.")]
    assert "has not learned to find anything: 10.0%" in sentence


def test_interrupted_runs_are_not_called_untestable() -> None:
    base = sample(complete=False)
    first = replace(
        base,
        runs=tuple(run for run in base.runs if run.subject == "alibi"),
        measurements=tuple(m for m in base.measurements if m.subject == "alibi"),
        refusals=(),
    )
    summary = summarise(first)
    assert row_of(summary, "alibi").verdict == "holds"
    assert {row.verdict for row in summary.rows if row.subject.name != "alibi"} == {"unfinished"}
    assert any(
        text.startswith("Not finished: ") and "Continue with --resume" in text
        for text in summary.answer
    )


def test_one_length_says_learned_or_not() -> None:
    summary = summarise(sample(lengths=(64,)))
    assert {row.verdict for row in summary.rows} == {"learned"}


def test_numbers_for_other_programs(tmp_path: Path) -> None:
    comparison = with_recall(t5=(1.0, 1.0))
    found = numbers(comparison, summarise(comparison), out=tmp_path)
    assert json.loads(json.dumps(found)) == found
    by_name = {record["name"]: record for record in found}
    t5 = by_name["t5"]
    assert t5["verdict"] == "degrades"
    assert t5["gate"] is None
    assert t5["lengths"]["512"]["loss"]["n"] == 3
    assert t5["lengths"]["512"]["loss"]["mean"] == pytest.approx(3.26, abs=0.03)
    assert t5["lengths"]["512"]["recall"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 3}
    assert t5["models"][0] == str(tmp_path / "runs/t5/seed-0/model")
    assert by_name["rope|window=64"]["models"][0] == str(tmp_path / "runs/rope/seed-0/model")
    learned = by_name["learned"]
    assert learned["gate"] == "untestable" in GATES
    assert "the learned table ends" in learned["reason"]
    assert learned["lengths"]["512"]["loss"] is None
    assert "table ends" in learned["lengths"]["512"]["refusal"]


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"translation", "phonemes"}))
def test_every_task_has_a_gate(name: str) -> None:
    """A level to reach, or a trivial one to leave; and known data measured where it is finite."""
    task = TASKS[name].make(ComparisonSettings(out=Path("out"), task=name))
    (headline,) = [metric for metric in task.metrics if metric.headline]
    assert headline.learned is not None or headline.trivial is not None
    measured_on_known = any(metric.key == "seen" for metric in task.metrics)
    assert measured_on_known == (name in ("language", "masked", "digits", "temperature"))
