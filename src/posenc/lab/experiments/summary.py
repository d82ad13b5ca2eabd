"""The outcome of a comparison: verdicts, headline, reasons and remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.settling import remedies
from posenc.lab.experiments.verdicts import Row, by_metric, judged, longest_measured, reasons
from posenc.lab.reporting.judge import GATES, LEARNED_NOTHING, SEVERITY, indistinguishable
from posenc.lab.reporting.numbers import exactly, sentence
from posenc.lab.reporting.opening import LONGEST, Remedy, at_times, of_one, shortened


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Verdicts on a comparison, in words.

    Args:
        rows: of the subjects, the best first.
        headline: the finding in at most 90 characters.
        remedies: ways to settle what is open.
        answer: reasons why there are no verdicts, or no sure ones, in sentences.
    """

    rows: tuple[Row, ...]
    headline: str
    remedies: tuple[Remedy, ...]
    answer: tuple[str, ...]


def summarise(comparison: Comparison) -> Summary:
    """Verdicts on all subjects of a comparison, and the finding in words."""
    rows = judged(comparison)
    open_rows = [row for row in rows if row.gate or row.subject.role == "candidate"]
    return Summary(
        rows=rows,
        headline=headline(comparison, rows),
        remedies=remedies(comparison, rows),
        answer=tuple(reasons(comparison, open_rows, longest_measured(comparison, rows))),
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
        return "Nothing has been measured yet"
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
    still_open = [row.verdict in OPEN for row in candidates]
    facts = {
        "of": len(candidates),
        "at": at,
        "learned": any(row.verdict == "learned" for row in candidates),
        "still_open": not held and any(still_open),
        "all_open": all(still_open),
    }
    for (most_held, most_best, form), most in product(FORMS, NAMES):
        lone = held if len(held) == 1 <= most_held else []
        best, found = (
            ["it"] if rows and rows == lone else [_name(row, most) for row in rows]
            for rows in (loss, recall if form != "best_by" else [])
        )
        names = [_name(row, most) for row in held]
        text = sentence("holding", held=names, most=most_held, **facts)
        winners = _best(comparison, best, found, form, of=len(candidates), most=most_best)
        text = f"{text}: {winners}" if winners else text
        if len(text) <= LONGEST:
            return text
    return sentence("holding", held=names, most=0, **facts)


def _unjudged(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The gate that stopped all, or how many each gate stopped."""
    gates = Counter(row.verdict for row in rows).most_common()
    if len(gates) > 1:
        return sentence("no_verdict", of=len(rows), gates=gates)
    lone = _name(rows[0]) if len(rows) == 1 else ""
    steps = comparison.provenance.settings.get("steps")
    longer = any(row.values for row in rows)
    facts = {"gate": gates[0][0], "of": len(rows), "lone": lone}
    return sentence("all_gated", **facts, steps=steps, longer=longer)


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


def _best(
    comparison: Comparison,
    best: Sequence[str],
    found: Sequence[str],
    form: str,
    *,
    of: int,
    most: int,
) -> str:
    """Names of the best by the deciding metric and by recall; "" if none got that far."""
    recall = comparison.metric("recall")
    nouns = [comparison.headline.noun, *([recall.noun] if recall is not None and found else [])]
    if best and found and best != found:
        return sentence(form, best=best, found=found, nouns=nouns, of=of, most=most)
    joint = " or " if len(best) == of else " and "
    facts = {"noun": joint.join(nouns), "of": of, "most": most}
    return sentence("best_by", names=best, **facts) if best else ""


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
    best = comparison.values(first.subject.name, metric.key, longest)

    def tied(row: Row) -> bool:
        return indistinguishable(
            metric, comparison.values(row.subject.name, metric.key, longest), best
        )

    return [row for row in learned if row is first or (row.finds != "unsure" and tied(row))]
