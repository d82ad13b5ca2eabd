"""Statistics of seeds, gates and verdicts, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from posenc.lab.experiments import summary as answer
from posenc.lab.experiments import verdicts
from posenc.lab.experiments.results import (
    ComparedEncoding,
    Comparison,
    Measurement,
    Metric,
    Provenance,
    RefusedMeasurement,
    TrainedRun,
)
from posenc.lab.experiments.results import Corpus as CorpusRecord

SEEDS = (0, 1, 2)


def metric(key: str = "loss", **changes: object) -> Metric:
    plain = Metric(
        key=key,
        label=key,
        unit="bits" if key == "loss" else "share of needles",
        axis="length",
        lower_is_better=key == "loss",
        trivial=5.0 if key == "loss" else 0.06,
        description="",
        headline=key == "loss",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


LOSS = metric(learned=4.0, overfit=0.5)
RECALL = metric("recall", learned=0.5)
SEEN = metric("seen", unit="bits", lower_is_better=True, trivial=4.8, learned=3.8)

Values = Mapping[str, Mapping[int, tuple[float, ...]]]
"""Metric to length to a value a seed."""


def comparison(**subjects: Values) -> Comparison:
    """Subjects by name; ``nope`` is the control."""
    lengths = (64, 128, 256)
    records = [
        Measurement(subject=name, seed=seed, metric=key, x=length, value=value)
        for name, values in subjects.items()
        for key, by_length in values.items()
        for length, each in by_length.items()
        for seed, value in zip(SEEDS, each, strict=False)
    ]
    runs = [
        TrainedRun(
            subject=name,
            seed=seed,
            steps=10,
            parameters=1,
            tokens_per_second=1.0,
            peak_memory_bytes=1,
            train_seconds=1.0,
        )
        for name, values in subjects.items()
        for seed in SEEDS
        if values
    ]
    return Comparison(
        task="language",
        title="",
        train_length=64,
        test_lengths=lengths,
        metrics=(LOSS, RECALL, SEEN),
        subjects=tuple(
            ComparedEncoding(
                name=n, label=n, role="control" if n == "nope" else "candidate", note=""
            )
            for n in subjects
        ),
        runs=tuple(runs),
        measurements=tuple(records),
        refusals=(
            RefusedMeasurement(subject="learned", metric="loss", x=128, reason="its table ends"),
        ),
        provenance=Provenance(
            command="",
            created="",
            versions={},
            device="cpu",
            threads=1,
            seeds=SEEDS,
            corpus=CorpusRecord(
                name="", files=1, train_bytes=1, held_out_bytes=1, sha256="", unit="bytes"
            ),
            settings={"steps": 10},
        ),
        complete=True,
    )


def flat(value: float, spread: float = 0.01) -> tuple[float, float, float]:
    return value - spread, value, value + spread


def losses(*values: float) -> dict[str, Mapping[int, tuple[float, ...]]]:
    return {"loss": {n: flat(v) for n, v in zip((64, 128, 256), values, strict=False)}}


NOPE = losses(3.5, 3.8, 4.5)


def verdict(values: Values, **others: Values) -> str:
    rows = verdicts.judged(comparison(alibi=values, nope=NOPE, **others))
    return next(row for row in rows if row.subject.name == "alibi").verdict


def test_pairs_by_seed() -> None:
    """Seeds that stand in another order, and one that the other lacks."""
    found = verdicts.paired_difference(
        {2: 9.0, 0: 1.0, 1: 5.0, 3: 2.0}, {0: 0.9, 1: 4.9, 2: 8.9, 7: 0.0}
    )
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.half_width == pytest.approx(0.0, abs=1e-9)
    found = verdicts.paired_difference({5: 1.0, 6: 2.0}, {6: 2.0, 5: 1.5})
    assert found is not None
    assert found.mean == pytest.approx(-0.25)


def test_interval() -> None:
    found = verdicts.estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


def test_holds_up_to_the_first_loss() -> None:
    """Worse at 128, as good as before at 256: it held up to 64."""
    values = {n: verdicts.Estimate(v, None, 1) for n, v in {64: 2.0, 128: 3.0, 256: 2.0}.items()}
    assert verdicts.held(values, LOSS, 64) == 64
    values[128] = verdicts.Estimate(2.05, None, 1)
    assert verdicts.held(values, LOSS, 64) == 256


def test_changes_are_shares_of_the_base() -> None:
    found = verdicts.change(LOSS, {0: 2.0, 1: 4.0}, {1: 5.0, 0: 2.5})
    assert found is not None
    assert found.mean == pytest.approx(0.25)
    better = verdicts.change(RECALL, {0: 0.5}, {0: 1.0})
    assert better is not None
    assert better.mean == pytest.approx(-1.0)


def test_one_seed_has_a_margin() -> None:
    assert verdicts.compared(LOSS, {0: 2.00}, {0: 2.01}) == "same"
    assert verdicts.compared(LOSS, {0: 2.00}, {0: 2.20}) == "better"
    assert verdicts.compared(RECALL, {0: 0.2}, {0: 0.9}) == "worse"
    assert verdicts.compared(LOSS, {0: 2.0}, {1: 9.0}) is None


def test_gates_come_first() -> None:
    good = losses(2.0, 2.0, 2.02)
    assert verdict(good) == "holds"
    assert verdict({}) == "unfinished"
    assert verdict(losses(4.1, 4.1, 4.1)) == "unlearned"
    near_chance = {"loss": {n: flat(3.9, 0.9) for n in (64, 256)}}
    assert verdict(near_chance) == "unlearned", "the interval reaches chance"
    assert verdict(good | {"seen": {64: flat(1.0)}}) == "overfitted"
    assert verdict(good | {"seen": {64: flat(1.8)}}) == "holds"
    assert verdict(good | {"seen": {64: flat(1.4)}}) == "holds", "0.2 of the gap is the data's"
    unlearned = losses(4.1, 4.1, 4.1)
    assert verdict(unlearned | {"seen": {64: flat(3.2)}}) == "overfitted"
    assert verdict(unlearned | {"seen": {64: flat(3.7)}}) == "unlearned", "the gap is small"
    assert verdict(losses(6.0, 6.0, 6.0) | {"seen": {64: flat(4.0)}}) == "unlearned"
    level = {64: (3.48, 3.52, 3.50), 128: flat(3.8), 256: (4.52, 4.48, 4.50)}
    assert verdict({"loss": level}) == "tied"
    further = {"loss": level | {256: flat(3.51)}}
    assert verdict(further) == "holds", "told from the control at 256"
    assert verdict(losses(2.0)) == "untestable"


def test_changes_are_judged_by_their_interval() -> None:
    assert verdict(losses(2.0, 2.0, 2.3)) == "degrades"
    assert verdict(losses(2.0, 2.0, 3.0)) == "breaks"
    wide = {"loss": {64: flat(2.0), 256: (2.0, 2.3, 3.1)}}
    assert verdict(wide) == "unsure"


def test_recall_is_weighed() -> None:
    good = losses(2.0, 2.0, 2.02)

    def finding(*shares: float) -> Values:
        return good | {"recall": {n: flat(s) for n, s in zip((64, 128, 256), shares, strict=True)}}

    assert verdict(finding(0.9, 0.9, 0.9)) == "holds"
    assert verdict(finding(0.9, 0.5, 0.1)) == "breaks"
    assert verdict(finding(0.2, 0.2, 0.2)) == "unsure"
    worse = losses(2.0, 2.0, 3.0)
    assert verdict(worse | {"recall": {n: flat(0.9) for n in (64, 256)}}) == "breaks"


def test_only_what_has_learned_is_ranked_and_told() -> None:
    found = comparison(
        alibi=losses(2.0, 2.0, 2.02), t5=losses(4.2, 4.2, 1.0), rope=losses(2.0, 2.5, 3.0)
    )
    rows = {row.subject.name: row for row in verdicts.judged(found)}
    assert (rows["t5"].rank, rows["alibi"].rank, rows["rope"].rank) == (None, 1, 2)
    told = " ".join(answer.summarise(found).answer)
    assert "Best at 256 tokens: alibi" in told
    assert "Not learned, so no verdict: t5 4.2" in told
    assert "in words" not in verdicts.reason(found, rows["alibi"])
    assert verdicts.reason(found, rows["alibi"]) == ""
    assert "--steps 600; these had 10" in verdicts.reason(found, rows["t5"])
