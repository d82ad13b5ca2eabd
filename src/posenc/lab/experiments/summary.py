"""The outcome of a comparison, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from posenc.lab.experiments.gates import gated, unsure
from posenc.lab.experiments.headline import headline
from posenc.lab.experiments.results import Comparison, Metric
from posenc.lab.experiments.settling import remedies
from posenc.lab.experiments.statistics import compared, held
from posenc.lab.experiments.verdicts import LEARNED_NOTHING, Row, judged, longest_measured
from posenc.lab.reporting.intervals import Bounds, Estimate, paired_difference
from posenc.lab.reporting.opening import Remedy
from posenc.lab.reporting.sentences import amount, sentence

MANIFOLD = 3.0
"""Larger changes are given as multiples."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Verdicts on a comparison, in words.

    Args:
        rows: of the subjects, the best first.
        headline: the finding in at most 90 characters.
        remedies: ways to settle what is open.
        answer: the finding in detail: sentences, the most important first.
    """

    rows: tuple[Row, ...]
    headline: str
    remedies: tuple[Remedy, ...]
    answer: tuple[str, ...]


def summarise(comparison: Comparison) -> Summary:
    """Verdicts on all subjects of a comparison, and the finding in words."""
    rows = judged(comparison)
    return Summary(
        rows=rows,
        headline=headline(comparison, rows),
        remedies=remedies(comparison, rows),
        answer=tuple(_answer(comparison, rows)),
    )


def _answer(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    metric, train = comparison.headline, comparison.train_length
    longest = longest_measured(comparison, rows)
    if not comparison.complete:
        yield sentence("interrupted", runs=len(comparison.runs))
    if not any(row.values for row in rows):
        if any(row.gate == "untestable" for row in rows):
            yield from gated(comparison, rows, longest)
        else:
            yield f"{sentence('nothing_measured')}."
        return
    if longest == train:
        yield _at_one_length(comparison, rows)
        yield from gated(comparison, rows, longest)
        yield sentence("certainty", seeds=comparison.most_seeds, complete=comparison.complete)
        return
    candidates = [row for row in rows if row.subject.role == "candidate"]
    for verdict in ("holds", "degrades", "breaks"):
        chosen = [row for row in candidates if row.verdict == verdict]
        if chosen:
            details = [
                ("" if len(chosen) == 1 else f"{row.subject.label} ")
                + _change(row, metric, train, longest, unit=row is chosen[0])
                + _recalled(row, train, unit=row is chosen[0])
                for row in chosen
            ]
            yield sentence(
                "by_length",
                verdict=verdict,
                names=[row.subject.label for row in chosen],
                details=details,
                length=longest,
                unit=comparison.length_unit,
                factor=longest / train,
            )
    yield from unsure(comparison, candidates)
    yield from gated(comparison, rows, longest)
    yield from _best(comparison, candidates, longest)
    yield from _most_found(comparison, rows)
    yield from _references(comparison, rows, longest)
    yield sentence("certainty", seeds=comparison.most_seeds, complete=comparison.complete)


def _at_one_length(comparison: Comparison, rows: tuple[Row, ...]) -> str:
    length = comparison.train_length
    values = [(row.subject.label, row.values[length]) for row in rows if length in row.values]
    return sentence("one_length", values=values, metric=comparison.headline)


def _change(row: Row, metric: Metric, train: int, longest: int, *, unit: bool) -> str:
    """Change from the training length to the last tested, and the longest length that holds."""
    assert row.change is not None  # rows with a verdict by length have one
    last = max(row.values)
    before, after = (
        amount(replace(row.values[length], half_width=None), metric, unit=unit and length == last)
        for length in (train, last)
    )
    if last < longest:
        after += f" at {last}"
    notes = [f"{before} → {after}"]
    if math.isfinite(row.change.mean):  # there is none of 0
        notes.append(_percent(row.change))
    longest_held = held(row.values, metric, train)
    if row.predicts != "holds" and longest_held > train:
        notes.append(f"holds up to {longest_held}")
    return ", ".join(notes)


def _recalled(row: Row, train: int, *, unit: bool) -> str:
    """Needles found at the training length and at the last, after a comma."""
    if row.finds is None or row.finds == "untestable":
        return ""
    last = row.recall[max(row.recall)]
    of = " of needles found" if unit else " found"
    note = ", which it has not learned" if row.finds == "unlearned" else ""
    return f", {row.recall[train].mean:.0%} → {last.shown('.0%')}{of}{note}"


def _percent(change: Estimate) -> str:
    """A change for the worse, with its interval, in words."""
    if change.mean > MANIFOLD:
        times = replace(change, mean=1 + change.mean, bounds=Bounds(0.0))
        return f"{times.shown()} times as much"
    size = change.scaled(1 if change.mean > 0 else -1)
    form = ".0%" if size.mean >= 0.095 else ".1%"
    return f"{size.shown(form)} {'worse' if change.mean > 0 else 'better'}"


def _best(comparison: Comparison, rows: Sequence[Row], longest: int) -> Iterable[str]:
    ranked = [row for row in rows if row.rank is not None]
    if len(ranked) < 2:
        return
    best = [row for row in ranked if row.rank == ranked[0].rank]
    others = [row for row in ranked if row.rank != ranked[0].rank]
    predicts = " in what it predicts" if any(row.recall for row in rows) else ""
    yield sentence(
        "best",
        labels=[row.subject.label for row in best],
        others=[row.subject.label for row in others],
        lead=_gap(comparison, others[0], best[0], longest) if others else "",
        at=f"at {longest} {comparison.length_unit}{predicts}",
    )


def _gap(comparison: Comparison, worse: Row, better: Row, length: int) -> str:
    key = comparison.headline.key
    gap = paired_difference(
        comparison.values(worse.subject.name, key, length),
        comparison.values(better.subject.name, key, length),
    )
    metric = comparison.headline
    scale, unit = (100, "points") if metric.is_share else (1, metric.unit)
    if gap is None:
        return f"an unknown number of {unit}"
    bounds = Bounds(-1.0, 1.0) if metric.is_share else Bounds()
    lead = replace(gap, bounds=bounds).scaled(math.copysign(scale, gap.mean))
    return f"{lead.shown()} {unit}"


def _most_found(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    """Recall at the longest length, of all that have learned it, and how often a guess is right."""
    metric = comparison.metric("recall")
    gates = (None, "unlearned", "untestable")
    learned = [r for r in rows if r.finds not in gates and r.verdict not in LEARNED_NOTHING]
    longest = max((length for row in learned for length in row.recall), default=None)
    if metric is None or longest is None:
        return
    measured = [row for row in learned if longest in row.recall]
    measured.sort(key=lambda row: -row.recall[longest].mean)
    values = [
        (row.subject.label, amount(row.recall[longest], metric, unit=False)) for row in measured
    ]
    at = f"at {longest} {comparison.length_unit}"
    yield sentence("recall", metric=metric, at=at, values=values)


def _references(comparison: Comparison, rows: tuple[Row, ...], longest: int) -> Iterable[str]:
    metric = comparison.headline
    for row in rows:
        if longest not in row.values or row.subject.role == "candidate":
            continue
        mine = comparison.values(row.subject.name, metric.key, longest)
        ahead = [
            other.subject.label
            for other in rows
            if other.subject.role == "candidate"
            and other.verdict not in LEARNED_NOTHING
            and compared(metric, comparison.values(other.subject.name, metric.key, longest), mine)
            == "better"
        ]
        yield sentence(
            "reference",
            role=row.subject.role,
            label=row.subject.label,
            value=row.values[longest],
            metric=metric,
            at=f"at {longest} {comparison.length_unit}",
            ahead=ahead,
        )
