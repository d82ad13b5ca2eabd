"""The finding in one line: short, and true."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from posenc.lab.experiments.results import Comparison, Measurement
from posenc.lab.experiments.summary import OPEN, headline
from posenc.lab.experiments.verdicts import Row, judged
from posenc.lab.reporting.numbers import paired_difference
from posenc.lab.reporting.opening import LONGEST
from tests.support.samples import ACCURACY, LOSS, RECALL, altered, compared, sample

Ends = dict[str, tuple[float, float]]
"""By name, the value at the training length and at the longest."""


def made(
    loss: Ends, recall: Ends, *, seeds: int = 3, noise: float = 0.01, complete: bool = True
) -> Comparison:
    """Candidates with loss and recall at the training length and at the longest, over seeds."""
    source = random.Random(0)
    measured = []
    for key, values, most in (("loss", loss, 9.0), ("recall", recall, 1.0)):
        for name, ends in values.items():
            for length, mean in zip((64, 512), ends, strict=True):
                for seed in range(seeds):
                    value = min(source.gauss(mean, noise * mean), most)
                    at = {"subject": name, "seed": seed, "metric": key, "x": length}
                    measured.append(Measurement(value=value, **at))
    base = sample(seeds=(0,), lengths=(64,))
    runs = tuple(replace(base.runs[0], subject=n, seed=s) for n in loss for s in range(seeds))
    found = {"runs": runs, "measurements": tuple(measured), "refusals": (), "complete": complete}
    sizes = {"test_lengths": (64, 512), "metrics": (LOSS, RECALL)}
    return replace(base, subjects=compared(*loss), **sizes, **found)


def said(comparison: Comparison) -> str:
    return headline(comparison, judged(comparison))


FLAT, WORSE, FAR = (2.0, 2.0), (2.1, 2.4), (2.1, 4.0)
FINDS, LOSES = (1.0, 1.0), (1.0, 0.2)
SHARED = (FLAT, FLAT, FAR)
AT = "at 8 × the trained length"
BEST = "has the best loss and recall"


@pytest.mark.parametrize(
    ("losses", "recalls", "who", "best"),
    [
        ((FLAT, FAR), (LOSES, FINDS), "None holds", "a has the best loss, b the best recall"),
        ((FLAT, FAR), (FINDS, LOSES), "a holds", f"it {BEST}"),
        ((FLAT, FAR), (), "a holds", "it has the best loss"),
        (SHARED, (FINDS, FINDS, LOSES), "a and b hold", "a and b share the best loss and recall"),
        ((FLAT, FLAT), (), "Both hold", "the seeds tell none apart by loss"),
        ((FAR,), (FINDS,), "a breaks", "loss 2.09 → 3.99, recall 99.3% → 99.8%"),
    ],
)
def test_says_who_holds_and_who_is_best(
    losses: tuple[tuple[float, float], ...],
    recalls: tuple[tuple[float, float], ...],
    who: str,
    best: str,
) -> None:
    ends = (dict(zip("abc", values, strict=False)) for values in (losses, recalls))
    assert said(made(*ends)) == f"{who} {AT}: {best}"


def test_what_the_seeds_leave_open_is_not_denied() -> None:
    comparison = made({"a": FLAT, "b": FAR}, {"a": (1.0, 0.6), "b": FINDS}, noise=0.001)
    wide = altered(comparison, lambda m: (1.0, 0.9, 0.1)[m.seed], "a", "recall", 512)
    assert said(wide) == f"None surely holds {AT}: a has the best loss, b the best recall"
    own = tuple(m for m in wide.measurements if m.subject == "a")
    alone = replace(wide, measurements=own, subjects=wide.subjects[:1])
    assert said(alone).startswith(f"a is undecided {AT}: ")


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (replace(sample(), measurements=(), runs=()), "Nothing has been measured yet"),
        (sample(lengths=(64,)), f"Trained and tested at 64 tokens: rope {BEST}"),
        (sample(complete=False), f"alibi holds so far {AT}: it {BEST}"),
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


def candidates(comparison: Comparison) -> list[Row]:
    return [row for row in judged(comparison) if row.subject.role == "candidate"]


@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("verdict", ["unlearned", "overfitted", "tied", "untestable", "unfinished"])
def test_what_has_no_verdict_gets_none(verdict: str, lone: bool) -> None:
    rows = [replace(row, verdict=verdict) for row in candidates(sample())]
    text = headline(sample(), rows[: 1 if lone else None])
    assert len(text) <= LONGEST
    assert text.startswith(rows[0].subject.label if lone else ("None of the 5 ", "All 5 "))
    assert "hold" not in text


def test_mixed_gates_are_counted() -> None:
    gates = ("tied", "unlearned", "tied", "untestable", "tied")
    rows = zip(candidates(sample()), gates, strict=True)
    told = headline(sample(), [replace(row, verdict=gate) for row, gate in rows])
    assert told == "None of the 5 has a verdict: 3 tied, 1 unlearned, 1 untestable"


def test_metrics_have_nouns() -> None:
    assert replace(LOSS, key="token_accuracy").noun == "token accuracy"
    assert replace(LOSS, key="bleu", short="BLEU").noun == "BLEU"


def best(comparison: Comparison, rows: list[Row], key: str) -> tuple[set[str], set[str]]:
    """Candidates that may be called best: the leader, and those not told from it."""
    if not rows:
        return {""}, set()
    values = {row.subject.name: comparison.values(row.subject.name, key, 512) for row in rows}
    sign = 1 if key == "loss" else -1
    leader = min(values, key=lambda name: sign * fmean(values[name].values()))
    gaps = {name: paired_difference(each, values[leader]) for name, each in values.items()}
    tied = {name for name, gap in gaps.items() if gap.half_width is not None and not gap.sure}
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
    seeds, noise = source.choice([1, 2, 3]), source.choice([0.0, 0.003, 0.05, 0.2])
    complete = source.random() < 0.8
    comparison = made(loss, recall, seeds=seeds, noise=noise, complete=complete)
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
