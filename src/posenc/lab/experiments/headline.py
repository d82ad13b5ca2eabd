"""The finding of a comparison in one line, short enough for a heading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.verdicts import GATES, LEARNED_NOTHING, Row, by_metric, longest_measured
from posenc.lab.reporting.headlines import LONGEST, at_times, of_one, shortened
from posenc.lab.reporting.intervals import paired_difference
from posenc.lab.reporting.sentences import exactly, sentence
from posenc.lab.reporting.verdicts import SEVERITY

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
