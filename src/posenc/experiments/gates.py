"""Reasons why subjects of a comparison have no verdict, in words, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from posenc.experiments.results import Comparison, Metric
from posenc.experiments.statistics import Estimate
from posenc.experiments.tasks import TASKS
from posenc.experiments.verdicts import LEARNED_NOTHING, Row
from posenc.experiments.wording import amount, listed

__all__ = ["gated", "reason", "unsure"]

MORE = 4
"""So many times the steps are advised where nothing was learned, and a part of them where too
much was."""


def reason(comparison: Comparison, row: Row) -> str:
    """Why a subject has no verdict, or an unsure one; "" where it has one."""
    longest = comparison.test_lengths[-1]
    return " ".join([*unsure(comparison, [row]), *gated(comparison, [row], longest)])


def unsure(comparison: Comparison, rows: Sequence[Row]) -> Iterable[str]:
    """Rows with an interval too wide, or of which recall says nothing."""
    train = comparison.train_length
    for row in rows:
        if row.verdict != "unsure":
            continue
        label = row.subject.label
        metrics = {"predicts": comparison.headline, "finds": comparison.metric("recall")}
        for name, metric in metrics.items():
            values = row.values if name == "predicts" else row.recall
            verdict = getattr(row, name)
            if metric is None or verdict not in ("unsure", "unlearned", "untestable"):
                continue
            if verdict == "unsure":
                before, after = (amount(values[n], metric) for n in (train, max(values)))
                yield (
                    f"Unsure: {label}, whose seeds do not agree: {before} → {after} at "
                    f"{max(values)}. Use more seeds (--seeds), or train "
                    f"longer{_longer(comparison)}."
                )
            elif verdict == "unlearned":
                yield (
                    f"Unsure: {label}. It predicts as well at {max(row.values)} as at {train}, but "
                    f"has not learned to find anything: {amount(values[train], metric)} at "
                    f"{train}, where {_asked(metric)}. Near context alone may do for its "
                    f"predictions; train longer{_longer(comparison)}."
                )
            else:
                yield f"Unsure: {label}, which could not be asked to find anything at {train}."


def gated(comparison: Comparison, rows: Sequence[Row], longest: int) -> Iterable[str]:
    """Rows without a verdict, a sentence or two for each gate."""
    metric, train = comparison.headline, comparison.train_length

    def stopped(gate: str) -> list[Row]:
        return [row for row in rows if row.gate == gate]

    yield from _unfinished(stopped("unfinished"))
    yield from _unlearned(comparison, stopped("unlearned"))
    if over := stopped("overfitted"):
        told = _each(over, lambda row: row.values[train], metric)
        seen = _each(over, lambda row: row.seen, metric)
        fewer = _steps(comparison, lambda steps: steps // MORE)
        yield (
            f"No verdict, overfitted: {told} on what was held out, but {seen} on what it was "
            f"trained on. Give more data (--text) or train for fewer steps{fewer}."
        )
    for row in stopped("tied"):
        yield (
            f"No verdict on {row.subject.label}: it cannot be told from {row.tied_with}, the "
            f"control, at {train} or at {max(row.values)}, so that nothing here is due to its "
            f"positions. Train longer{_longer(comparison)}, or use more seeds (--seeds)."
        )
    yield from _untestable([row for row in rows if row.gate in ("untestable", *LEARNED_NOTHING)])
    beyond = {x: why for row in rows for x, why in row.refusals.items() if x > longest}
    if beyond:
        first = min(beyond)
        yield f"Nothing could be tested at {first}: {beyond[first]}."


def _unfinished(rows: Sequence[Row]) -> Iterable[str]:
    if rows:
        names = listed([row.subject.label for row in rows])
        yield f"Not finished: {names}. Continue with --resume."


def _unlearned(comparison: Comparison, rows: Sequence[Row]) -> Iterable[str]:
    metric, train = comparison.headline, comparison.train_length
    if rows:
        told = _each(rows, lambda row: row.values[train], metric)
        yield (
            f"Not learned, so no verdict: {told} at the training length, where {_asked(metric)}. "
            f"Train longer{_longer(comparison)}."
        )


def _asked(metric: Metric) -> str:
    """The level at which something counts as learned."""

    def shown(value: float) -> str:
        return amount(Estimate(value, None, 1), metric, unit=False)

    told = []
    if metric.learned is not None:
        told.append(
            f"{metric.rule} gives {shown(metric.learned)}"
            if metric.rule
            else f"{shown(metric.learned)} is asked for"
        )
    if metric.chance is not None:
        told.append(f"a guess gives {shown(metric.chance)}")
    return " and ".join(told)


def _untestable(rows: Sequence[Row]) -> Iterable[str]:
    """Names that share a reason together."""
    names: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.refusals:
            first = min(row.refusals)
            names.setdefault((first, row.refusals[first]), []).append(row.subject.label)
    for (length, why), labels in names.items():
        yield f"{listed(labels)} could not be tested at {length}: {why}."


def _each(rows: Sequence[Row], value: Callable[[Row], Estimate | None], metric: Metric) -> str:
    """Names with their values, the unit once."""
    values = [(row.subject.label, value(row)) for row in rows]
    return "; ".join(
        f"{label} {amount(one, metric, unit=label == values[0][0])}"
        for label, one in values
        if one is not None
    )


def _longer(comparison: Comparison) -> str:
    """An option for more steps, in brackets: four times as many, or the task's own if more."""
    entry = TASKS.get(comparison.task)
    usual = 0 if entry is None else entry.defaults.steps
    return _steps(comparison, lambda steps: max(MORE * steps, usual))


def _steps(comparison: Comparison, change: Callable[[int], int]) -> str:
    steps = comparison.provenance.settings.get("steps")
    if not isinstance(steps, int):
        return ""
    return f" (--steps {max(1, change(steps))}; these had {steps})"
