"""Verdicts on the subjects of a comparison, and reasons why there are none.

That a subject holds, degrades or breaks is decided by ``reporting/opening.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from posenc.lab.experiments.results import ComparedEncoding, Comparison, Metric
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.reporting.numbers import (
    SHARES,
    Bounds,
    Estimate,
    estimate,
    paired_difference,
    sentence,
)
from posenc.lab.reporting.opening import HOLDS, SEVERITY, Word, deterioration, word

MARGIN = 0.02
"""With one seed, values that differ by at most this share of the larger count as the same."""

HIGHEST = {"BLEU": 100.0, "chrF": 100.0}
"""Units of scores that end somewhere, and where."""


def compared(
    metric: Metric, a: Mapping[int, float], b: Mapping[int, float]
) -> Literal["better", "worse", "same"] | None:
    """Compare ``a`` with ``b`` by the interval of their paired difference.

    With one seed in common, by ``MARGIN``; None without any.

    Args:
        metric: of the values.
        a, b: seed to value.
    """
    gap = paired_difference(a, b)
    if gap is None:
        return None
    if gap.half_width is None:
        largest = max(abs(value) for seed in a.keys() & b.keys() for value in (a[seed], b[seed]))
        differs = abs(gap.mean) > MARGIN * largest
    else:
        differs = gap.sure
    if not differs:
        return "same"
    return "better" if (gap.mean < 0) == metric.lower_is_better else "worse"


def change(metric: Metric, base: Mapping[int, float], last: Mapping[int, float]) -> Estimate | None:
    """Deterioration from ``base`` to ``last`` as a share of ``base``, seed by seed.

    Args:
        metric: of the values.
        base, last: seed to value.
    """
    most = Bounds(low=-1.0) if metric.lower_is_better else Bounds(high=1.0)
    return estimate(
        (
            deterioration(last[seed], base[seed], lower=metric.lower_is_better)
            for seed in sorted(base.keys() & last.keys())
        ),
        most,
    )


def held(values: Mapping[int, Estimate], metric: Metric, train: int) -> int:
    """The longest length up to which the mean holds.

    Args:
        values: length to estimate of the metric.
        metric: of the values.
        train: training length, one of ``values``.
    """
    last = train
    for length in sorted(values):
        means = values[length].mean, values[train].mean
        if deterioration(*means, lower=metric.lower_is_better) > HOLDS:
            break
        last = length
    return last


def bounds_of(metric: Metric, *, changed: bool = False) -> Bounds:
    """Range of a metric, or of its change from the training length.

    Shares of what is right end at 1, scores where their unit does; errors, which may be shares
    too, are only positive. Changes of shares are differences, of other metrics parts of the value
    at the training length.
    """
    if metric.is_share and not metric.lower_is_better:
        return Bounds(-1.0, 1.0) if changed else SHARES
    if changed:
        return Bounds(-math.inf if metric.is_share else -1.0)
    return Bounds(0.0, HIGHEST.get(metric.unit, math.inf))


Gate = Literal["tied", "unlearned", "overfitted", "untestable", "unfinished"]
Verdict = Word | Literal["learned"] | Gate
"""Verdict on length (``unsure`` also if a measurement says nothing); ``learned`` if the training
length is the only one; or a gate."""

GATES: tuple[Gate, ...] = ("unfinished", "untestable", "unlearned", "overfitted", "tied")
"""Reasons why there is no verdict, in the order in which they are asked."""

LEARNED_NOTHING: tuple[Gate, ...] = ("unlearned", "overfitted")
"""Gates of subjects whose values say nothing of length."""


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
        change: deterioration from the training length to the longest one measured, as a share of
            the former (negative: better), seed by seed.
        recall: length to estimate of the "recall" metric, if that was measured.
        seen: the headline metric at the training length on training data.
        tokens_per_second, peak_memory_bytes, parameters: of training, means over seeds.
    """

    subject: ComparedEncoding
    rank: int | None
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
    unranked = [_row(comparison, subject) for subject in comparison.subjects]
    longest = longest_measured(comparison, unranked)
    sign = 1 if comparison.headline.lower_is_better else -1

    def order(row: Row) -> tuple[bool, float]:
        last = row.values.get(longest) or row.values.get(comparison.train_length)
        return longest not in row.values, sign * last.mean if last else math.inf

    ordered = sorted(unranked, key=order)
    return tuple(_ranked(comparison, ordered, longest))


def longest_measured(comparison: Comparison, rows: Iterable[Row]) -> int:
    """The longest length at which anything was measured."""
    return max((length for row in rows for length in row.values), default=comparison.train_length)


def _row(comparison: Comparison, subject: ComparedEncoding) -> Row:
    metric, train = comparison.headline, comparison.train_length
    values = _estimates(comparison, subject, metric.key)
    recall = _estimates(comparison, subject, "recall")
    refusals = {
        int(refusal.x): refusal.reason
        for refusal in comparison.refusals
        if (refusal.subject, refusal.metric) == (subject.name, metric.key)
    }
    tied_with = _tied_with(comparison, subject)
    predicts = _judged(comparison, subject, metric, values)
    finds = None
    asked = comparison.metric("recall")
    if asked is not None and recall:
        finds = _judged(comparison, subject, asked, recall)
    if predicts not in GATES and tied_with is not None:
        predicts = "tied"
    runs = [run for run in comparison.runs if run.subject == subject.name]
    return Row(
        subject=subject,
        rank=None,
        verdict=_both(predicts, finds),
        predicts=predicts,
        finds=finds,
        tied_with=tied_with,
        values=values,
        refusals=refusals,
        change=_change(comparison, subject, metric, values),
        recall=recall,
        seen=_estimates(comparison, subject, "seen").get(train),
        tokens_per_second=_mean(run.tokens_per_second for run in runs),
        peak_memory_bytes=_mean(float(run.peak_memory_bytes) for run in runs),
        parameters=runs[0].parameters if runs else None,
    )


def _estimates(comparison: Comparison, subject: ComparedEncoding, key: str) -> dict[int, Estimate]:
    """Length to estimate of a metric."""
    metric = comparison.metric(key)
    bounds = Bounds() if metric is None else bounds_of(metric)
    values = {n: comparison.values(subject.name, key, n).values() for n in comparison.test_lengths}
    return {n: interval for n in values if (interval := estimate(values[n], bounds)) is not None}


def _change(
    comparison: Comparison,
    subject: ComparedEncoding,
    metric: Metric,
    values: Mapping[int, Estimate],
) -> Estimate | None:
    """Change from the training length to the longest tested; None if none is longer."""
    train = comparison.train_length
    tested = [length for length in values if length > train]
    if not tested or train not in values:
        return None
    base = comparison.values(subject.name, metric.key, train)
    return change(metric, base, comparison.values(subject.name, metric.key, max(tested)))


def _judged(
    comparison: Comparison,
    subject: ComparedEncoding,
    metric: Metric,
    values: Mapping[int, Estimate],
) -> Verdict:
    """The verdict by one metric, or the first gate that stops it, but for the control's."""
    train = comparison.train_length
    if not any(run.subject == subject.name for run in comparison.runs):
        return "unfinished"
    if train not in values:
        return "untestable"
    learned = _learned(metric, values[train])
    if metric.headline and _overfitted(comparison, subject, learned=learned):
        return "overfitted"
    if not learned:
        return "unlearned"
    worse = _change(comparison, subject, metric, values)
    if worse is None:
        return "untestable" if len(comparison.test_lengths) > 1 else "learned"
    return word(worse)


def _learned(metric: Metric, base: Estimate) -> bool:
    """True if the mean reaches the required level and the interval excludes the trivial one."""
    sign = 1 if metric.lower_is_better else -1
    if metric.learned is not None and sign * (base.mean - metric.learned) > 0:
        return False
    if metric.trivial is None:
        return True
    spread = MARGIN * abs(metric.trivial) if base.half_width is None else base.half_width
    return sign * (base.mean - metric.trivial) + spread < 0


def _overfitted(comparison: Comparison, subject: ComparedEncoding, *, learned: bool) -> bool:
    """True if training data is learned, and held-out data is not or costs too much more.

    Nothing is overfitted that has not learned its training data either. Of the gap, that of the
    predictor behind ``Metric.learned`` is due to the data, not to the model.

    Args:
        learned: whether held-out data is.
    """
    metric, train = comparison.headline, comparison.train_length
    training_metric = comparison.metric("seen") or metric
    held_out = comparison.values(subject.name, metric.key, train)
    training = comparison.values(subject.name, "seen", train)
    training_mean = estimate(training.values())
    if training_mean is None or not (learned or _learned(training_metric, training_mean)):
        return False
    shift = 0.0
    if metric.learned is not None and training_metric.learned is not None:
        shift = metric.learned - training_metric.learned
    fair = {seed: value + shift for seed, value in training.items()}
    if compared(metric, fair, held_out) != "better":
        return False
    if metric.overfit is None:
        return not learned
    gap = paired_difference(held_out, fair)
    return gap is not None and abs(gap.mean) > metric.overfit


def _tied_with(comparison: Comparison, subject: ComparedEncoding) -> str | None:
    """The control that a candidate is the same as, at the training length and at the last."""
    if subject.role != "candidate":
        return None
    metric, train = comparison.headline, comparison.train_length
    for control in comparison.subjects:
        if control.role != "control":
            continue
        stands = {
            length: compared(
                metric,
                comparison.values(subject.name, metric.key, length),
                comparison.values(control.name, metric.key, length),
            )
            for length in comparison.test_lengths
        }
        comparable = [length for length, how in stands.items() if how is not None]
        if train in comparable and stands[train] == stands[max(comparable)] == "same":
            return control.label
    return None


def _both(predicts: Verdict, finds: Verdict | None) -> Verdict:
    """The worse verdict; at best unsure if recall was not learned."""
    if predicts in GATES or predicts == "learned" or finds is None:
        return predicts
    return max(predicts, finds if finds in SEVERITY else "unsure", key=SEVERITY.index)


def _mean(values: Iterable[float]) -> float | None:
    over_seeds = estimate(values)
    return None if over_seeds is None else over_seeds.mean


def _ranked(comparison: Comparison, rows: list[Row], longest: int) -> Iterable[Row]:
    """Rows with ranks; a row not significantly worse than the first of a rank shares it."""
    key = comparison.headline.key
    leader: Row | None = None
    rank = place = 0
    for row in rows:
        if longest not in row.values or row.verdict in LEARNED_NOTHING:
            yield row
            continue
        place += 1
        if leader is not None:
            mine = comparison.values(row.subject.name, key, longest)
            best = comparison.values(leader.subject.name, key, longest)
            gap = paired_difference(mine, best)
            if gap is not None and gap.half_width is not None and not gap.sure:
                yield replace(row, rank=rank)
                continue
        leader, rank = row, place
        yield replace(row, rank=rank)


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
