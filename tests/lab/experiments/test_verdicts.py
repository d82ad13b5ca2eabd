"""Statistics of seeds, gates and verdicts, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from posenc.lab.experiments import verdicts
from posenc.lab.experiments.results import Comparison, Measurement
from posenc.lab.experiments.summary import summarise
from posenc.lab.reporting import judge
from posenc.lab.reporting.numbers import Estimate
from tests.support import samples as sampled

SEEDS = (0, 1, 2)
LENGTHS = (64, 128, 256)

LOSS = replace(sampled.LOSS, trivial=5.0, learned=4.0, overfit=0.5)
RECALL = replace(sampled.RECALL, trivial=0.06, learned=0.5)
SEEN = replace(LOSS, key="seen", headline=False, trivial=4.8, learned=3.8, overfit=None)

Values = Mapping[str, Mapping[int, tuple[float, ...]]]
"""Metric to length to a value a seed."""


def comparison(**subjects: Values) -> Comparison:
    """Subjects by name; ``nope`` is the control."""
    base = sampled.sample(seeds=SEEDS, lengths=LENGTHS)
    measured = [
        Measurement(subject=name, seed=seed, metric=key, x=length, value=value)
        for name, values in subjects.items()
        for key, by_length in values.items()
        for length, each in by_length.items()
        for seed, value in zip(SEEDS, each, strict=False)
    ]
    runs = [(name, seed) for name, values in subjects.items() for seed in SEEDS if values]
    return replace(
        base,
        metrics=(LOSS, RECALL, SEEN),
        subjects=sampled.compared(*subjects),
        runs=tuple(replace(base.runs[0], subject=name, seed=seed) for name, seed in runs),
        measurements=tuple(measured),
        refusals=(),
        provenance=replace(base.provenance, settings={"steps": 10}),
    )


def flat(value: float, spread: float = 0.01) -> tuple[float, float, float]:
    return value - spread, value, value + spread


def losses(*values: float) -> dict[str, Mapping[int, tuple[float, ...]]]:
    return {"loss": {n: flat(v) for n, v in zip(LENGTHS, values, strict=False)}}


def finding(*shares: float) -> dict[str, Mapping[int, tuple[float, ...]]]:
    return {"recall": {n: flat(s) for n, s in zip(LENGTHS, shares, strict=True)}}


NOPE = losses(3.5, 3.8, 4.5)
GOOD, BAD, UNLEARNED = losses(2.0, 2.0, 2.02), losses(2.0, 2.0, 3.0), losses(4.1, 4.1, 4.1)
NO_LEVEL = {"learned": None, "trivial": 2.05}
LEVEL = {64: (3.48, 3.52, 3.50), 128: flat(3.8), 256: (4.52, 4.48, 4.50)}


@pytest.mark.parametrize(
    ("values", "changes", "verdict"),
    [
        (GOOD, {}, "holds"),
        ({}, {}, "unfinished"),
        (losses(2.0), {}, "untestable"),
        (UNLEARNED, {}, "unlearned"),
        # the interval reaches chance
        ({"loss": {n: flat(3.9, 0.9) for n in (64, 256)}}, {}, "unlearned"),
        (GOOD, NO_LEVEL, "holds"),
        ({"loss": {n: flat(2.0, 0.1) for n in (64, 256)}}, NO_LEVEL, "unlearned"),
        (GOOD | {"seen": {64: flat(1.0)}}, {}, "overfitted"),
        (GOOD | {"seen": {64: flat(1.8)}}, {}, "holds"),
        # 0.2 of the gap is the data's
        (GOOD | {"seen": {64: flat(1.4)}}, {}, "holds"),
        (UNLEARNED | {"seen": {64: flat(3.2)}}, {}, "overfitted"),
        # the gap is small
        (UNLEARNED | {"seen": {64: flat(3.7)}}, {}, "unlearned"),
        (UNLEARNED | {"seen": {64: flat(3.7)}}, {"overfit": None}, "overfitted"),
        # known text is learned no more than other text: that is the text's doing
        (losses(6.0, 6.0, 6.0) | {"seen": {64: flat(4.0)}}, {}, "unlearned"),
        ({"loss": LEVEL}, {}, "tied"),
        # told from the control at 256
        ({"loss": LEVEL | {256: flat(3.51)}}, {}, "holds"),
        # changes are judged by their interval
        (losses(2.0, 2.0, 2.3), {}, "degrades"),
        (BAD, {}, "breaks"),
        ({"loss": {64: flat(2.0), 256: (2.0, 2.3, 3.1)}}, {}, "unsure"),
        # recall is weighed
        (GOOD | finding(0.9, 0.9, 0.9), {}, "holds"),
        (GOOD | finding(0.9, 0.5, 0.1), {}, "breaks"),
        (GOOD | finding(0.2, 0.2, 0.2), {}, "unsure"),
        (BAD | finding(0.9, 0.9, 0.9), {}, "breaks"),
    ],
)
def test_gates_come_first_and_the_worse_verdict_counts(
    values: Values, changes: dict[str, Any], verdict: str
) -> None:
    found = comparison(alibi=values, nope=NOPE)
    found = replace(found, metrics=(replace(LOSS, **changes), RECALL, SEEN))
    (row,) = [row for row in verdicts.judged(found) if row.subject.name == "alibi"]
    assert row.verdict == verdict


def test_holds_up_to_the_first_loss() -> None:
    """Worse at 128, as good as before at 256: it held up to 64."""
    values = {n: Estimate(v, None, 1) for n, v in {64: 2.0, 128: 3.0, 256: 2.0}.items()}
    assert judge.held(values, LOSS, 64) == 64
    values[128] = Estimate(2.05, None, 1)
    assert judge.held(values, LOSS, 64) == 256


def test_changes_are_shares_of_the_base() -> None:
    found = judge.change(LOSS, {0: 2.0, 1: 4.0}, {1: 5.0, 0: 2.5})
    assert found.mean == pytest.approx(0.25)
    assert judge.change(RECALL, {0: 0.5}, {0: 1.0}).mean == pytest.approx(-1.0)


def test_intervals_of_changes_end_where_changes_do() -> None:
    """A loss loses all of itself at most, and so does what was found; neither has another end."""
    loss = judge.change(LOSS, {0: 4.0, 1: 4.0}, {0: 0.1, 1: 3.0})
    recall = judge.change(RECALL, {0: 0.5, 1: 0.5}, {0: 0.05, 1: 0.4})
    assert (loss.low, recall.high) == (-1.0, 1.0)
    assert loss.high > 1.0
    assert recall.low < -1.0


def test_one_seed_has_a_margin() -> None:
    assert judge.compared(LOSS, {0: 2.00}, {0: 2.01}) == "same"
    assert judge.compared(LOSS, {0: 2.00}, {0: 2.20}) == "better"
    assert judge.compared(RECALL, {0: 0.2}, {0: 0.9}) == "worse"
    assert judge.compared(LOSS, {0: 2.0}, {1: 9.0}) is None


def test_only_what_has_learned_is_ranked_and_told() -> None:
    found = comparison(alibi=GOOD, t5=losses(4.2, 4.2, 1.0), rope=losses(2.0, 2.5, 3.0))
    rows = {row.subject.name: row for row in verdicts.judged(found)}
    assert (rows["t5"].rank, rows["alibi"].rank, rows["rope"].rank) == (None, 1, 2)
    (why,) = summarise(found).answer
    assert why.startswith("Not learned, so no verdict: t5 4.2")
    assert verdicts.reason(found, rows["alibi"]) == ""
    assert verdicts.reason(found, rows["t5"]) == why
