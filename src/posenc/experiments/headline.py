"""The finding of a comparison in one line, short enough for a heading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posenc.experiments.results import Comparison
from posenc.experiments.statistics import paired_difference
from posenc.experiments.verdicts import GATES, LEARNED_NOTHING, SEVERITY, Row, longest_measured
from posenc.experiments.wording import sentence

LONGEST = 90
"""Characters of a headline."""

LONGEST_NAME = 24

FORMS = (
    *((9, 9, "both_best"), (2, 2, "both_best"), (0, 2, "both_best")),
    *((0, 1, "both_best"), (0, 1, "leading"), (0, 1, "best_by")),
)
"""From the most detailed on: most names of those that hold, and of the best, before they are
counted, and the sentence on the best, of which the last leaves out recall."""

OPEN = ("unsure", "unfinished", "tied", *LEARNED_NOTHING)
"""Verdicts after which a candidate may still turn out to hold."""


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The candidates that hold at the longest length, and the best by loss and by recall.

    Args:
        comparison: the records.
        rows: verdicts on its subjects, the best first.
    """
    candidates = [row for row in rows if row.subject.role == "candidate"] or list(rows)
    if not any(row.values for row in rows):
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
    for most_holding, most_best, form in FORMS:
        holding = _holding(candidates, at, most_holding)
        found = [] if form == "best_by" else recall
        best = _best(comparison, candidates, loss, found, form, most_best)
        text = f"{holding}: {best}" if best else holding
        if len(text) <= LONGEST:
            return text
    return _holding(candidates, at, 0)


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
    extent = "size" if comparison.headline.axis.startswith("size") else "length"
    return f"{so_far}at {longest / train:.3g} × the trained {extent}"


def _name(row: Row) -> str:
    label = row.subject.label
    return label if len(label) <= LONGEST_NAME else f"{label[: LONGEST_NAME - 1]}…"


def _of_one(comparison: Comparison, row: Row, longest: int, at: str) -> str:
    """The verdict on the only candidate, with its values if they fit."""
    train = comparison.train_length
    measured = [(comparison.headline, row.values), (comparison.metric("recall"), row.recall)]
    changes = [
        (metric.noun, metric, values[train], values[longest])
        for metric, values in measured
        if metric is not None and train in values and longest in values
    ]
    texts = (
        sentence("alone", label=_name(row), verdict=row.verdict, at=at, changes=shown)
        for shown in (changes, changes[:1], ())
    )
    return next(text for text in texts if len(text) <= LONGEST)


def _holding(candidates: Sequence[Row], at: str, most: int) -> str:
    if any(row.verdict == "learned" for row in candidates):
        return sentence("one_length_only", at=at)
    held = [_name(row) for row in candidates if row.verdict == "holds"]
    possible = [row for row in candidates if row.verdict in OPEN]
    if possible and not held:
        return sentence(
            "undecided", of=len(candidates), at=at, all=len(possible) == len(candidates)
        )
    return sentence("holding", held=held, of=len(candidates), at=at, most=most)


def _best(
    comparison: Comparison,
    candidates: Sequence[Row],
    loss: Sequence[Row],
    recall: Sequence[Row],
    form: str,
    most: int,
) -> str:
    """The best by the deciding metric and by recall; "" if nothing was measured that far."""
    held = [row for row in candidates if row.verdict == "holds"]

    def names(rows: Sequence[Row]) -> list[str]:
        return ["it"] if len(rows) == 1 and list(rows) == held else [_name(row) for row in rows]

    asked = comparison.metric("recall")
    nouns = [comparison.headline.noun, *([asked.noun] if asked is not None and recall else [])]
    facts = {"of": len(candidates), "most": most}
    if loss and recall and loss != recall:
        best, found = names(loss), names(recall)
        return sentence(form, best=best, found=found, nouns=nouns, **facts)
    if not loss:
        return ""
    joint = " or " if len(loss) == len(candidates) else " and "
    return sentence("best_by", names=names(loss), noun=joint.join(nouns), **facts)


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
