"""Reasons why subjects of a comparison have no verdict, in words, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.experiments.verdicts import LEARNED_NOTHING, Row, by_metric
from posenc.lab.reporting.sentences import sentence

MORE = 4
"""Factor of the advised steps if nothing was learned; divisor if overfitted."""


def reason(comparison: Comparison, row: Row) -> str:
    """Reason why a subject has no verdict or an unsure one; "" if it has one."""
    longest = comparison.test_lengths[-1]
    return " ".join([*unsure(comparison, [row]), *gated(comparison, [row], longest)])


def unsure(comparison: Comparison, rows: Sequence[Row]) -> Iterable[str]:
    """Sentences on rows whose interval is too wide or whose recall is not learned."""
    train = comparison.train_length
    for row in rows:
        if row.verdict != "unsure":
            continue
        label, advice = row.subject.label, longer_training(comparison)
        for metric, verdict, values in by_metric(comparison, row):
            facts: dict[str, Any] = {"label": label, "metric": metric, "advice": advice}
            if verdict == "unsure":
                last = max(values)
                facts |= {"before": values[train], "after": values[last], "last": last}
                yield sentence("disagreeing", **facts)
            elif verdict == "unlearned":
                facts |= {"train": train, "value": values[train], "last": max(row.values)}
                yield sentence("finding_nothing", **facts)
            elif verdict == "untestable":
                yield sentence("never_asked", label=label, train=train)


def gated(comparison: Comparison, rows: Sequence[Row], longest: int) -> Iterable[str]:
    """Sentences on rows without a verdict, for each gate."""
    metric, train = comparison.headline, comparison.train_length

    def stopped(gate: str) -> list[Row]:
        return [row for row in rows if row.gate == gate]

    def values(rows: Sequence[Row]) -> list[object]:
        return [(row.subject.label, row.values[train]) for row in rows]

    if unfinished := stopped("unfinished"):
        yield sentence("unfinished", labels=[row.subject.label for row in unfinished])
    if unlearned := stopped("unlearned"):
        yield sentence(
            "unlearned", values=values(unlearned), metric=metric, advice=longer_training(comparison)
        )
    if over := stopped("overfitted"):
        yield sentence(
            "overfitted",
            held_out=values(over),
            seen=[(row.subject.label, row.seen) for row in over if row.seen is not None],
            metric=metric,
            known=comparison.metric("seen"),
            advice=advised_steps(comparison, lambda steps: steps // MORE),
        )
    for row in stopped("tied"):
        yield sentence(
            "tied",
            label=row.subject.label,
            control=row.tied_with,
            train=train,
            last=max(row.values),
            advice=longer_training(comparison),
        )
    yield from _untestable([row for row in rows if row.gate in ("untestable", *LEARNED_NOTHING)])
    beyond = {x: why for row in rows for x, why in row.refusals.items() if x > longest}
    if beyond:
        first = min(beyond)
        yield sentence("untestable", labels=[], length=first, reason=beyond[first])


def _untestable(rows: Sequence[Row]) -> Iterable[str]:
    """Names that share a reason together."""
    names: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.refusals:
            first = min(row.refusals)
            names.setdefault((first, row.refusals[first]), []).append(row.subject.label)
    for (length, why), labels in names.items():
        yield sentence("untestable", labels=labels, length=length, reason=why)


def longer_training(comparison: Comparison) -> tuple[int, int] | None:
    """Advised steps (four times as many, or the task's own if more), and the actual ones."""
    entry = TASKS.get(comparison.task)
    usual = 0 if entry is None else entry.defaults.steps
    return advised_steps(comparison, lambda steps: max(MORE * steps, usual))


def advised_steps(comparison: Comparison, change: Callable[[int], int]) -> tuple[int, int] | None:
    """Changed steps, and the actual ones; None if those are unknown."""
    steps = comparison.provenance.settings.get("steps")
    return (max(1, change(steps)), steps) if isinstance(steps, int) else None
