"""The outcome of a comparison, in words and in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from posenc.lab.experiments.results import Comparison, Metric
from posenc.lab.experiments.settling import remedies
from posenc.lab.experiments.verdicts import (
    GATES,
    LEARNED_NOTHING,
    Row,
    by_metric,
    compared,
    gated,
    held,
    judged,
    longest_measured,
    unsure,
)
from posenc.lab.reporting.numbers import (
    Bounds,
    Estimate,
    amount,
    exactly,
    paired_difference,
    sentence,
)
from posenc.lab.reporting.opening import LONGEST, SEVERITY, Remedy, at_times, of_one, shortened

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
    yield from _best_sentences(comparison, candidates, longest)
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


def _best_sentences(comparison: Comparison, rows: Sequence[Row], longest: int) -> Iterable[str]:
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


NAMES = (24, 14)
"""Characters of a name, at most; the second where the first leaves no room."""

FORMS = (
    *((9, 9, "both_best"), (2, 2, "both_best"), (0, 2, "both_best")),
    *((0, 1, "both_best"), (0, 1, "leading"), (0, 1, "best_by")),
)
"""Forms of the headline, the most detailed first: most names of those that hold, and of the best,
before they are counted instead; and the sentence on the best, the last of which omits recall."""

OPEN = ("unsure", "unfinished", "tied", *LEARNED_NOTHING)
"""Verdicts after which a candidate may still turn out to hold."""


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The candidates that hold at the longest length, and the best by loss and by recall.

    Args:
        comparison: the records.
        rows: verdicts on its subjects, the best first.
    """
    candidates = [row for row in rows if row.subject.role == "candidate"] or list(rows)
    if not any(row.values or row.gate == "untestable" for row in rows):
        return sentence("nothing_measured")
    judged = [row for row in candidates if row.verdict not in GATES]
    if not judged:
        return _unjudged(comparison, candidates)
    longest = longest_measured(comparison, rows)
    at = _place(comparison, longest)
    if len(candidates) == 1:
        return _of_one(comparison, candidates[0], longest, at)
    loss = _best_loss(judged, longest)
    recall = _best_recall(comparison, judged, longest)
    held = [row for row in candidates if row.verdict == "holds"]
    for (most_held, most_best, form), most in product(FORMS, NAMES):
        named = [] if form == "best_by" else recall
        lone = held if len(held) == 1 <= most_held else []
        names, by_recall = (
            ["it"] if rows and rows == lone else [_name(row, most) for row in rows]
            for rows in (loss, named)
        )
        holding = _holding(candidates, at, [_name(row, most) for row in held], most_held)
        best = _best(comparison, names, by_recall, form, of=len(candidates), most=most_best)
        text = f"{holding}: {best}" if best else holding
        if len(text) <= LONGEST:
            return text
    return _holding(candidates, at, [_name(row, most) for row in held], 0)


def _unjudged(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The gate that stopped all, or how many each gate stopped."""
    gates = Counter(row.verdict for row in rows).most_common()
    if len(gates) > 1:
        return sentence("no_verdict", of=len(rows), gates=gates)
    lone = _name(rows[0]) if len(rows) == 1 else ""
    steps = comparison.provenance.settings.get("steps")
    longer = any(row.values for row in rows)
    return sentence(f"all_{gates[0][0]}", of=len(rows), lone=lone, steps=steps, longer=longer)


def _place(comparison: Comparison, longest: int) -> str:
    train = comparison.train_length
    so_far = "" if comparison.complete else "so far "
    if longest == train:
        return f"{so_far}at {train} {comparison.length_unit}"
    size = comparison.headline.axis.startswith("size")
    return f"{so_far}{at_times(longest, train, size=size)}"


def _name(row: Row, most: int = NAMES[0]) -> str:
    return shortened(row.subject.label, most)


def _of_one(comparison: Comparison, row: Row, longest: int, at: str) -> str:
    """The verdict on the only candidate, with its values if they fit."""
    train = comparison.train_length
    changes = [
        (metric.noun, *(exactly(values[length].mean, metric) for length in (train, longest)))
        for metric, _, values in by_metric(comparison, row)
        if train in values and longest in values
    ]
    return of_one(_name(row), row.verdict, at, changes)


def _holding(candidates: Sequence[Row], at: str, held: Sequence[str], most: int) -> str:
    if any(row.verdict == "learned" for row in candidates):
        return sentence("one_length_only", at=at)
    still = [row for row in candidates if row.verdict in OPEN]
    if still and not held:
        return sentence("undecided", of=len(candidates), at=at, all=len(still) == len(candidates))
    return sentence("holding", held=held, of=len(candidates), at=at, most=most)


def _best(
    comparison: Comparison, best: Sequence[str], by_recall: Sequence[str], form: str, **facts: int
) -> str:
    """Names of the best by the deciding metric and by recall; "" if none got that far."""
    asked = comparison.metric("recall")
    nouns = [comparison.headline.noun, *([asked.noun] if asked is not None and by_recall else [])]
    if best and by_recall and best != by_recall:
        return sentence(form, best=best, found=by_recall, nouns=nouns, **facts)
    joint = " or " if len(best) == facts["of"] else " and "
    return sentence("best_by", names=best, noun=joint.join(nouns), **facts) if best else ""


def _best_loss(judged: Sequence[Row], longest: int) -> list[Row]:
    """The first of the candidates, and those decided that share its rank."""
    ranked = [row for row in judged if row.rank is not None and longest in row.values]
    return [
        row
        for row in ranked
        if row is ranked[0] or (row.rank == ranked[0].rank and row.predicts != "unsure")
    ]


def _best_recall(comparison: Comparison, judged: Sequence[Row], longest: int) -> list[Row]:
    """The best that has learned it, and those decided that the seeds do not tell from it."""
    metric = comparison.metric("recall")
    verdicts = (*SEVERITY, "learned")
    learned = [row for row in judged if row.finds in verdicts and longest in row.recall]
    if metric is None or not learned:
        return []
    first = max(learned, key=lambda row: row.recall[longest].mean)

    def tied(row: Row) -> bool:
        mine, best = (comparison.values(r.subject.name, metric.key, longest) for r in (row, first))
        gap = paired_difference(mine, best)
        return gap is not None and gap.half_width is not None and not gap.sure

    return [row for row in learned if row is first or (row.finds != "unsure" and tied(row))]
