"""What the numbers of a comparison say, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from posenc.lab.results import Comparison, Metric, Subject

__all__ = [
    "Estimate",
    "Row",
    "Verdict",
    "estimate",
    "held",
    "judged",
    "longest_measured",
    "paired_difference",
]

Verdict = Literal["holds", "degrades", "breaks", "unlearned", "untestable"]

CONFIDENCE = 0.95

HOLDS, BREAKS = 0.05, 0.25
"""A subject holds while its metric is worse by at most the first share of its value at the training
length, and breaks when it is worse by more than the second; in between it degrades. What does not
reach ``Metric.learned`` at the training length is unlearned, whatever comes after."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval.

    Args:
        mean: of the seeds.
        half_width: of the Student-t interval; None with one seed, which says nothing of spread.
        n: seeds.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def low(self) -> float:
        """Lower end of the interval (the mean itself with one seed)."""
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval (the mean itself with one seed)."""
        return self.mean + (self.half_width or 0.0)

    @property
    def sure(self) -> bool:
        """Whether the interval is known and leaves out zero."""
        return self.half_width is not None and not self.low <= 0.0 <= self.high


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and 95 % Student-t interval of ``values``; None if there are none."""
    numbers = list(values)
    count = len(numbers)
    if not count:
        return None
    mean = math.fsum(numbers) / count
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in numbers) / (count - 1)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Estimate(mean, quantile * math.sqrt(variance / count), count)


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate | None:
    """Mean and interval of ``a - b`` over the seeds that both have.

    A seed fixes initial weights and data order for all subjects, so what seeds have in common
    cancels in the difference; subjects are told apart by this interval, not by whether their own
    intervals overlap.
    """
    return estimate(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys()))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found about one subject.

    Args:
        subject: which one.
        rank: 1 for the best at the longest length at which any was tested; subjects that cannot
            be told from the best of a rank share it. None for what could not be tested there.
        verdict: see ``Verdict``.
        values: context length to estimate of the headline metric.
        refusals: context length to the reason why there is no value.
        change: how much worse it is at the longest length it was tested at than at the training
            length, as a share of the latter (negative: better), seed by seed.
        recall: length to estimate of the "recall" metric, if that was measured.
        tokens_per_second, peak_memory_bytes, parameters: of training, means over seeds.
    """

    subject: Subject
    rank: int | None
    verdict: Verdict
    values: Mapping[int, Estimate]
    refusals: Mapping[int, str]
    change: Estimate | None
    recall: Mapping[int, Estimate]
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    parameters: int | None


def judged(comparison: Comparison) -> tuple[Row, ...]:
    """What every subject did: best at the longest length first, untestable ones last."""
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


def _row(comparison: Comparison, subject: Subject) -> Row:
    metric, train = comparison.headline, comparison.train_length
    values, refusals, recall = {}, {}, {}
    for length in comparison.test_lengths:
        found = estimate(comparison.values(subject.name, metric.key, length).values())
        if found is not None:
            values[length] = found
        remembered = estimate(comparison.values(subject.name, "recall", length).values())
        if remembered is not None:
            recall[length] = remembered
    for refusal in comparison.refusals:
        if (refusal.subject, refusal.metric) == (subject.name, metric.key):
            refusals[int(refusal.x)] = refusal.reason
    tested = [length for length in values if length > train]
    change = None
    if tested and train in values:
        base = comparison.values(subject.name, metric.key, train)
        last = comparison.values(subject.name, metric.key, max(tested))
        change = estimate(
            _worse(metric, last[seed], base[seed]) for seed in sorted(base.keys() & last.keys())
        )
    runs = [run for run in comparison.runs if run.subject == subject.name]
    return Row(
        subject=subject,
        rank=None,
        verdict=_verdict(metric, values.get(train), change),
        values=values,
        refusals=refusals,
        change=change,
        recall=recall,
        tokens_per_second=_mean(run.tokens_per_second for run in runs),
        peak_memory_bytes=_mean(float(run.peak_memory_bytes) for run in runs),
        parameters=runs[0].parameters if runs else None,
    )


def _worse(metric: Metric, value: float, base: float) -> float:
    """How much worse ``value`` is than ``base``, as a share of ``base``."""
    difference = value - base if metric.lower_is_better else base - value
    if not difference:
        return 0.0
    return difference / abs(base) if base else math.copysign(math.inf, difference)


def _verdict(metric: Metric, base: Estimate | None, change: Estimate | None) -> Verdict:
    if base is not None and metric.learned is not None:
        reached = base.mean - metric.learned
        if (reached > 0) if metric.lower_is_better else (reached < 0):
            return "unlearned"
    if change is None:
        return "untestable"
    if change.mean <= HOLDS:
        return "holds"
    return "breaks" if change.mean > BREAKS else "degrades"


def _mean(values: Iterable[float]) -> float | None:
    found = estimate(values)
    return None if found is None else found.mean


def _ranked(comparison: Comparison, rows: list[Row], longest: int) -> Iterable[Row]:
    """Rows with ranks: one that cannot be told from the first of a rank shares it."""
    key = comparison.headline.key
    leader: Row | None = None
    rank = 0
    for place, row in enumerate(rows, start=1):
        if longest not in row.values:
            yield row
            continue
        if leader is not None:
            mine = comparison.values(row.subject.name, key, longest)
            best = comparison.values(leader.subject.name, key, longest)
            gap = paired_difference(mine, best)
            if gap is not None and gap.half_width is not None and not gap.sure:
                yield replace(row, rank=rank)
                continue
        leader, rank = row, place
        yield replace(row, rank=rank)


def held(row: Row, metric: Metric, train: int) -> int:
    """The longest length up to which the mean is hardly worse than at the training length."""
    last = train
    for length in sorted(row.values):
        if _worse(metric, row.values[length].mean, row.values[train].mean) > HOLDS:
            break
        last = length
    return last
