"""Verdicts on the subjects of a comparison, and reasons why there are none.

What decides is in ``reporting/judge.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from posenc.lab.experiments.results import ComparedEncoding, Comparison
from posenc.lab.reporting.judge import (
    GATES,
    LEARNED_NOTHING,
    Metric,
    Values,
    Verdict,
    both,
    gap,
    is_tied,
    longest_change,
    ranks,
    verdict,
)
from posenc.lab.reporting.numbers import Bounds, Estimate, estimate, sentence


@dataclass(frozen=True, kw_only=True)
class Row:
    """Estimates and verdict of one subject.

    Args:
        subject: the subject.
        rank: 1 for the best at the longest tested length, shared by subjects not distinguishable
            from the first of a rank. None if not tested there, not learned or overfitted.
        verdict: the worse of ``predicts`` and ``finds``, or a gate.
        predicts: verdict by the headline metric.
        finds: verdict by recall; None if that was not measured.
        tied_with: label of the control that it is not better than.
        values: length to estimate of the headline metric.
        refusals: length to the reason why there is no value.
        behind: deficit to the best at the longest length, paired over seeds, as a share or in the
            metric's unit; None where it has no rank.
        change: deterioration from the training length to the longest one measured, as a share of
            the former (negative: better), seed by seed.
        recall: length to estimate of the "recall" metric, if that was measured.
        seen: the headline metric at the training length on training data.
        tokens_per_second, peak_memory_bytes, parameters: of training, means over seeds.
    """

    subject: ComparedEncoding
    rank: int | None = None
    behind: Estimate | None = None
    verdict: Verdict
    predicts: Verdict
    finds: Verdict | None
    tied_with: str | None
    values: Mapping[int, Estimate]
    refusals: Mapping[int, str]
    change: Estimate | None
    recall: Mapping[int, Estimate]
    seen: Estimate | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    parameters: int | None

    @property
    def gate(self) -> Verdict | None:
        """The gate; None if there is a verdict."""
        return self.verdict if self.verdict in GATES else None


def by_metric(
    comparison: Comparison, row: Row
) -> Iterator[tuple[Metric, Verdict | None, Mapping[int, Estimate]]]:
    """The deciding metric and, if the task has it, recall; with verdicts and estimates."""
    yield comparison.headline, row.predicts, row.values
    recall = comparison.metric("recall")
    if recall is not None:
        yield recall, row.finds, row.recall


def judged(comparison: Comparison) -> tuple[Row, ...]:
    """Every subject: best at the longest length first, untestable and unfinished ones last."""
    rows = [_row(comparison, subject) for subject in comparison.subjects]
    metric, longest = comparison.headline, longest_measured(comparison, rows)

    def order(row: Row) -> tuple[bool, float]:
        last = row.values.get(longest) or row.values.get(comparison.train_length)
        return longest not in row.values, metric.sign * last.mean if last else math.inf

    rows.sort(key=order)
    ranked = [row for row in rows if longest in row.values and row.verdict not in LEARNED_NOTHING]
    values = [comparison.values(row.subject.name, metric.key, longest) for row in ranked]
    placed = {
        row.subject.name: replace(row, rank=rank, behind=gap(metric, mine, values[0]))
        for row, rank, mine in zip(ranked, ranks(metric, values), values, strict=True)
    }
    return tuple(placed.get(row.subject.name, row) for row in rows)


def longest_measured(comparison: Comparison, rows: Iterable[Row]) -> int:
    """The longest length at which anything was measured."""
    return max((length for row in rows for length in row.values), default=comparison.train_length)


def _row(comparison: Comparison, subject: ComparedEncoding) -> Row:
    metric, train, name = comparison.headline, comparison.train_length, subject.name
    losses, recalls = (comparison.by_length(name, key) for key in (metric.key, "recall"))
    known, asked = comparison.metric("seen") or metric, comparison.metric("recall")
    seen = comparison.values(name, "seen", train)
    runs = [run for run in comparison.runs if run.subject == name]
    recall = _estimates(asked, recalls)
    predicts: Verdict = "unfinished"
    finds: Verdict | None = "unfinished" if asked and recall else None
    tied_with = None if subject.role != "candidate" else _tied_with(comparison, losses)
    if runs:
        predicts = verdict(metric, losses, train, known=(known, seen))
        finds = verdict(asked, recalls, train) if asked and recall else None
    if predicts not in GATES and tied_with is not None:
        predicts = "tied"
    return Row(
        subject=subject,
        verdict=both(predicts, finds),
        predicts=predicts,
        finds=finds,
        tied_with=tied_with,
        values=_estimates(metric, losses),
        refusals={
            int(refusal.x): refusal.reason
            for refusal in comparison.refusals
            if (refusal.subject, refusal.metric) == (name, metric.key)
        },
        change=longest_change(metric, losses, train),
        recall=recall,
        seen=_estimates(comparison.metric("seen"), {train: seen}).get(train),
        tokens_per_second=_mean(run.tokens_per_second for run in runs),
        peak_memory_bytes=_mean(float(run.peak_memory_bytes) for run in runs),
        parameters=runs[0].parameters if runs else None,
    )


def _estimates(metric: Metric | None, values: Mapping[int, Values]) -> dict[int, Estimate]:
    """Length to estimate of a metric."""
    bounds = Bounds() if metric is None else metric.bounds()
    means = ((length, estimate(each.values(), bounds)) for length, each in values.items())
    return {length: mean for length, mean in means if mean is not None}


def _tied_with(comparison: Comparison, values: Mapping[int, Values]) -> str | None:
    """The control that these values are the same as."""
    metric, train = comparison.headline, comparison.train_length
    for control in comparison.subjects:
        others = comparison.by_length(control.name, metric.key)
        if control.role == "control" and is_tied(metric, values, others, train):
            return control.label
    return None


def _mean(values: Iterable[float]) -> float | None:
    over_seeds = estimate(values)
    return None if over_seeds is None else over_seeds.mean


def reason(comparison: Comparison, row: Row) -> str:
    """Reason why a subject has no verdict or an unsure one; "" if it has one."""
    return " ".join(reasons(comparison, [row], comparison.test_lengths[-1]))


def reasons(comparison: Comparison, rows: Sequence[Row], longest: int) -> Iterator[str]:
    """Reasons why there are no verdicts, unsure ones, or no values beyond the longest length."""
    train = comparison.train_length
    for row in rows:
        for metric, word, values in by_metric(comparison, row) if row.verdict == "unsure" else ():
            if word in ("unsure", "unlearned", "untestable"):
                facts = {"label": row.subject.label, "metric": metric, "train": train}
                yield sentence("unsure", verdict=word, values=values, **facts)
    for gate in GATES:
        stopped = [row for row in rows if row.gate == gate]
        if stopped and gate != "untestable":
            yield sentence(
                "without_verdict",
                gate=gate,
                labels=[row.subject.label for row in stopped],
                values=[(r.subject.label, r.values[train]) for r in stopped if train in r.values],
                seen=[(row.subject.label, row.seen) for row in stopped if row.seen],
                controls=sorted({str(row.tied_with) for row in stopped}),
                metric=comparison.headline,
                known=comparison.metric("seen"),
                train=train,
            )
    names: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.refusals and row.gate in ("untestable", *LEARNED_NOTHING):
            first = min(row.refusals)
            names.setdefault((first, row.refusals[first]), []).append(row.subject.label)
    beyond = {x: why for row in rows for x, why in row.refusals.items() if x > longest}
    if beyond:
        names[min(beyond), beyond[min(beyond)]] = []
    for (length, why), labels in names.items():
        yield sentence("untestable", labels=labels, length=length, reason=why)
