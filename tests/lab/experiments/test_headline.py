"""The finding in one line: short, and true."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from posenc.lab.experiments.results import ComparedEncoding, Comparison, Measurement
from posenc.lab.experiments.summary import OPEN, headline
from posenc.lab.experiments.verdicts import Row, judged
from posenc.lab.reporting.numbers import paired_difference
from posenc.lab.reporting.opening import LONGEST
from tests.support.samples import ACCURACY, LOSS, RECALL, sample


def made(
    loss: dict[str, tuple[float, float]],
    recall: dict[str, tuple[float, float]],
    *,
    seeds: int = 3,
    noise: float = 0.01,
    complete: bool = True,
) -> Comparison:
    """Candidates with loss and recall at the training length and at the longest, over seeds."""
    source = random.Random(0)
    measurements = [
        Measurement(
            subject=name,
            seed=seed,
            metric=key,
            x=length,
            value=min(source.gauss(value, noise * value), 1.0 if key == "recall" else 9.0),
        )
        for key, values in (("loss", loss), ("recall", recall))
        for name, (first, last) in values.items()
        for length, value in zip((64, 512), (first, last), strict=True)
        for seed in range(seeds)
    ]
    run = sample(seeds=(0,), lengths=(64,)).runs[0]
    return replace(
        sample(seeds=(0,), lengths=(64,)),
        test_lengths=(64, 512),
        metrics=(LOSS, RECALL),
        subjects=tuple(
            ComparedEncoding(name=name, label=name, role="candidate", note="") for name in loss
        ),
        runs=tuple(replace(run, subject=n, seed=s) for n in loss for s in range(seeds)),
        measurements=tuple(measurements),
        refusals=(),
        complete=complete,
    )


def said(comparison: Comparison) -> str:
    return headline(comparison, judged(comparison))


FLAT, WORSE, FAR = (2.0, 2.0), (2.1, 2.4), (2.1, 4.0)
FINDS, LOSES = (1.0, 1.0), (1.0, 0.2)


@pytest.mark.parametrize(
    ("loss", "recall", "expected"),
    [
        (
            {"a": FLAT, "b": FAR},
            {"a": LOSES, "b": FINDS},
            "None holds at 8 × the trained length: a has the best loss, b the best recall",
        ),
        (
            {"a": FLAT, "b": FAR},
            {"a": FINDS, "b": LOSES},
            "a holds at 8 × the trained length: it has the best loss and recall",
        ),
        ({"a": FLAT, "b": FAR}, {}, "a holds at 8 × the trained length: it has the best loss"),
        (
            {"a": FLAT, "b": FLAT, "c": FAR},
            {"a": FINDS, "b": FINDS, "c": LOSES},
            "a and b hold at 8 × the trained length: a and b share the best loss and recall",
        ),
        (
            {"a": FLAT, "b": FLAT},
            {},
            "Both hold at 8 × the trained length: the seeds tell none apart by loss",
        ),
        (
            {"a": FAR},
            {"a": FINDS},
            "a breaks at 8 × the trained length: loss 2.09 → 3.99, recall 99.3% → 99.8%",
        ),
    ],
)
def test_says_who_holds_and_who_is_best(
    loss: dict[str, tuple[float, float]], recall: dict[str, tuple[float, float]], expected: str
) -> None:
    assert said(made(loss, recall)) == expected


def test_what_the_seeds_leave_open_is_not_denied() -> None:
    comparison = made({"a": FLAT, "b": FAR}, {"a": (1.0, 0.6), "b": FINDS}, noise=0.001)
    scattered = iter((1.0, 0.9, 0.1))
    wide = tuple(
        replace(m, value=next(scattered))
        if (m.subject, m.metric, m.x) == ("a", "recall", 512)
        else m
        for m in comparison.measurements
    )
    assert said(replace(comparison, measurements=wide)) == (
        "None surely holds at 8 × the trained length: a has the best loss, b the best recall"
    )
    (alone,) = [subject for subject in comparison.subjects if subject.name == "a"]
    own = tuple(m for m in wide if m.subject == "a")
    assert said(replace(comparison, measurements=own, subjects=(alone,))).startswith(
        "a is undecided at 8 × the trained length: "
    )


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (replace(sample(), measurements=(), runs=()), "Nothing has been measured yet"),
        (
            sample(lengths=(64,)),
            "Trained and tested at 64 tokens: rope has the best loss and recall",
        ),
        (
            sample(complete=False),
            "alibi holds so far at 8 × the trained length: it has the best loss and recall",
        ),
        (
            sample(metric=replace(LOSS, learned=1.0)),
            "None of the 5 has learned the task in 600 steps: length says nothing yet",
        ),
        (
            sample(metric=replace(ACCURACY, axis="size (pixels a side)", short="share right")),
            "alibi holds at 8 × the trained size: "
            "it has the best share right, 4 share the best recall",
        ),
    ],
    ids=["nothing", "one length", "interrupted", "unlearned", "images"],
)
def test_other_outcomes(comparison: Comparison, expected: str) -> None:
    assert said(comparison) == expected


@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("verdict", ["unlearned", "overfitted", "tied", "untestable", "unfinished"])
def test_what_has_no_verdict_gets_none(verdict: str, lone: bool) -> None:
    comparison = sample()
    rows = [
        replace(row, verdict=verdict)
        for row in judged(comparison)
        if row.subject.role == "candidate"
    ]
    text = headline(comparison, rows[: 1 if lone else None])
    assert len(text) <= LONGEST
    assert text.startswith(rows[0].subject.label if lone else ("None of the 5 ", "All 5 "))
    assert "hold" not in text


def test_mixed_gates_are_counted() -> None:
    comparison = sample()
    rows = [row for row in judged(comparison) if row.subject.role == "candidate"]
    gates = ("tied", "unlearned", "tied", "untestable", "tied")
    stopped = [replace(row, verdict=gate) for row, gate in zip(rows, gates, strict=True)]
    assert headline(comparison, stopped) == (
        "None of the 5 has a verdict: 3 tied, 1 unlearned, 1 untestable"
    )


def test_metrics_have_nouns() -> None:
    assert replace(LOSS, key="token_accuracy").noun == "token accuracy"
    assert replace(LOSS, key="bleu", short="BLEU").noun == "BLEU"


def best(comparison: Comparison, rows: list[Row], key: str) -> tuple[set[str], set[str]]:
    """Candidates that may be called best: the leader, and those not told from it."""
    if not rows:
        return {""}, set()
    sign = 1 if key == "loss" else -1
    means = {
        row.subject.name: (row.values if key == "loss" else row.recall)[512].mean for row in rows
    }
    leader = min(means, key=lambda name: sign * means[name])
    tied = set()
    for name in means:
        gap = paired_difference(
            comparison.values(name, key, 512), comparison.values(leader, key, 512)
        )
        if gap is not None and gap.half_width is not None and not gap.sure:
            tied.add(name)
    return {leader}, tied | {leader}


@pytest.mark.parametrize("seed", range(60))
def test_is_short_and_true_of_anything(seed: int) -> None:
    source = random.Random(seed)
    count = source.choice([2, 3, 5, 8, 13])
    tail = source.choice(["", "@max_distance=128", "+sinusoidal@base=500.0@randomized"])
    names = [f"m{number}{tail}" for number in range(count)]
    worse: Callable[[], float] = lambda: source.choice([0.0, 0.0, 0.01, 0.1, 0.4, 1.5])  # noqa: E731
    loss = {name: (2.0, 2.0 + worse() + source.random() * 0.01) for name in names}
    recall = {name: (1.0, max(0.1, 1.0 - worse())) for name in names}
    comparison = made(
        loss,
        recall,
        seeds=source.choice([1, 2, 3]),
        noise=source.choice([0.0, 0.003, 0.05, 0.2]),
        complete=source.random() < 0.8,
    )
    rows = list(judged(comparison))
    text = headline(comparison, rows)
    assert len(text) <= LONGEST
    short = {row.subject.name[:length]: row for row in rows for length in (13, 23, 99)}
    held = [row for row in rows if row.verdict == "holds"]
    still_open = [row for row in rows if row.verdict in OPEN]
    if all(row.gate for row in rows):
        return
    assert ("so far" in text) == (not comparison.complete)
    assert "at 8 × the trained length" in text
    clause, _, winners = text.partition(": ")
    if clause.startswith("None holds"):
        assert not held
        assert not still_open
    elif clause.startswith("None surely holds"):
        assert not held
        assert still_open
    elif "are undecided" in clause:
        assert len(still_open) == count
    elif clause.startswith(("All ", "Both ")):
        assert len(held) == count
    elif counted := re.match(r"(\d+) of the (\d+) holds? ", clause):
        assert [int(counted[1]), int(counted[2])] == [len(held), count]
    else:
        named = re.findall(r"m\d+[^ ,…]*", clause)
        assert {short[name].subject.name for name in named} == {r.subject.name for r in held}
    for key in ("loss", "recall"):
        learned = [row for row in rows if row.gate is None]
        if key == "recall":
            learned = [row for row in learned if row.finds != "unlearned"]
        (leader,), tied = best(comparison, learned, key)
        both = "(?:loss and )?" if key == "recall" else ""
        one = re.search(rf"(\S+) (?:has the best|the best|leads by|by) {both}{key}\b", winners)
        if one and not one[1].isdigit() and one[1] not in ("share", "apart", "tie"):
            name = held[0].subject.name if one[1] == "it" else short[one[1].strip("…")].subject.name
            assert name == leader
        shared = re.search(rf"\b(\d+) (?:share the best|tie by) {both}{key}\b", winners)
        if shared:
            assert 1 < int(shared[1]) <= len(tied)
        if re.search(rf"none apart by .*{key}", winners):
            assert len(tied) == count
