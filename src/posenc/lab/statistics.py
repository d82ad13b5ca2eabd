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
    "Summary",
    "Verdict",
    "estimate",
    "paired_difference",
    "summarise",
]

Verdict = Literal["holds", "degrades", "breaks", "unlearned", "untestable"]

CONFIDENCE = 0.95

MANIFOLD = 3.0
"""From four times as much on, a change is told as a multiple."""

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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The findings, best first, and the answer in words.

    Args:
        rows: a row a subject, best at the longest length first, untestable ones last.
        answer: sentences, the most important first.
    """

    rows: tuple[Row, ...]
    answer: tuple[str, ...]


def summarise(comparison: Comparison) -> Summary:
    """Judge every subject of a comparison, and say in words what came out."""
    unranked = [_row(comparison, subject) for subject in comparison.subjects]
    longest = _longest(comparison, unranked)
    sign = 1 if comparison.headline.lower_is_better else -1

    def order(row: Row) -> tuple[bool, float]:
        last = row.values.get(longest) or row.values.get(comparison.train_length)
        return longest not in row.values, sign * last.mean if last else math.inf

    ordered = sorted(unranked, key=order)
    rows = tuple(_ranked(comparison, ordered, longest))
    return Summary(rows=rows, answer=tuple(_answer(comparison, rows)))


def _longest(comparison: Comparison, rows: Iterable[Row]) -> int:
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


def _answer(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    metric, train = comparison.headline, comparison.train_length
    longest = _longest(comparison, rows)
    if not comparison.complete:
        done = len(comparison.runs)
        yield f"This comparison was interrupted: what follows rests on {done} finished runs."
    if not any(row.values for row in rows):
        yield "Nothing has been measured yet."
        return
    if longest == train:
        yield from _at_one_length(comparison, rows)
        return
    candidates = [row for row in rows if row.subject.role == "candidate"]
    factor = longest / train
    where = f"at {longest} {comparison.length_unit}, {factor:.3g} times the training length"
    for verdict, sentence in (
        ("holds", "{names} {hold} up {where}: {details}."),
        ("degrades", "{names} {degrade} {where}: {details}."),
        ("breaks", "{names} {break_} {where}: {details}."),
    ):
        chosen = [row for row in candidates if row.verdict == verdict and row.change]
        if chosen:
            one = len(chosen) == 1
            yield sentence.format(
                names=_list([row.subject.label for row in chosen]),
                where=where,
                details="; ".join(
                    ("" if one else f"{row.subject.label} ")
                    + _change(row, metric, train, longest, unit=row is chosen[0])
                    for row in chosen
                ),
                hold="holds" if one else "hold",
                degrade="degrades" if one else "degrade",
                break_="breaks" if one else "break",
            )
    yield from _unlearned(comparison, rows)
    yield from _best(comparison, candidates, longest)
    yield from _references(comparison, rows, longest)
    yield from _untestable(rows, longest)
    yield _certainty(comparison)


def _untestable(rows: tuple[Row, ...], longest: int) -> Iterable[str]:
    """What could not be tested, and why; names that share a reason together."""
    names: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.verdict == "untestable" and row.refusals:
            first = min(row.refusals)
            names.setdefault((first, row.refusals[first]), []).append(row.subject.label)
    for (length, reason), labels in names.items():
        yield f"{_list(labels)} could not be tested at {length}: {reason}."
    beyond = {x: why for row in rows for x, why in row.refusals.items() if x > longest}
    if beyond:
        first = min(beyond)
        yield f"Nothing could be tested at {first}: {beyond[first]}."


def _unlearned(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    """What did not learn the task, so that its other values say nothing of length."""
    metric, train = comparison.headline, comparison.train_length
    failed = [row for row in rows if row.verdict == "unlearned"]
    if failed:
        told = "; ".join(
            f"{row.subject.label} {_amount(row.values[train], metric, unit=row is failed[0])}"
            for row in failed
        )
        yield f"Not learned, even at the training length: {told}."


def _at_one_length(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    length, metric = comparison.train_length, comparison.headline
    measured = [row for row in rows if length in row.values]
    yield (
        "At the training length, the only one tested, from best to worst: "
        + "; ".join(
            f"{row.subject.label} {_amount(row.values[length], metric, unit=row is measured[0])}"
            for row in measured
        )
        + "."
    )
    yield _certainty(comparison)


def _change(row: Row, metric: Metric, train: int, longest: int, *, unit: bool) -> str:
    """From the training length to the last that was tested, and how far it held before."""
    assert row.change is not None  # callers choose rows that have one
    last = max(row.values)
    before = row.values[train].mean
    shown = f"{before:.1%}" if metric.is_share else f"{before:.3g}"
    after = _amount(replace(row.values[last], half_width=None), metric, unit=unit)
    said = [_percent(row.change)] if math.isfinite(row.change.mean) else []  # of 0, there is none
    if last < longest:
        after += f" at {last}"
    held = _held(row, metric, train)
    if row.verdict != "holds" and held > train:
        said.append(f"holds up to {held}")
    return f"{shown} → {after}" + (f" ({', '.join(said)})" if said else "")


def _held(row: Row, metric: Metric, train: int) -> int:
    """The longest length up to which the mean is hardly worse than at the training length."""
    held = train
    for length in sorted(row.values):
        if _worse(metric, row.values[length].mean, row.values[train].mean) > HOLDS:
            break
        held = length
    return held


def _percent(change: Estimate) -> str:
    """A change for the worse, with its interval, in words."""
    if change.mean > MANIFOLD:
        spread = "" if change.half_width is None else f" ± {change.half_width:.2g}"
        return f"{1 + change.mean:.2g}{spread} times as much"
    size = f"{abs(change.mean):.0%}" if abs(change.mean) >= 0.095 else f"{abs(change.mean):.1%}"
    spread = "" if change.half_width is None else f" ± {change.half_width:.1%}"
    return f"{size}{spread} {'worse' if change.mean > 0 else 'better'}"


def _best(comparison: Comparison, rows: list[Row], longest: int) -> Iterable[str]:
    ranked = [row for row in rows if row.rank is not None]
    if len(ranked) < 2:
        return
    best = [row for row in ranked if row.rank == ranked[0].rank]
    others = [row for row in ranked if row.rank != ranked[0].rank]
    names = _list([row.subject.label for row in best])
    if not others:
        yield f"At {longest} {comparison.length_unit} the seeds do not tell {names} apart."
        return
    lead = _gap(comparison, others[0], best[0], longest)
    together = "" if len(best) == 1 else ", which the seeds do not tell apart"
    yield (
        f"Best at {longest} {comparison.length_unit}: {names}{together}, {lead} ahead of "
        f"{others[0].subject.label}."
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
    spread = "" if gap.half_width is None else f" ± {scale * gap.half_width:.2g}"
    return f"{scale * abs(gap.mean):.2g}{spread} {unit}"


def _references(comparison: Comparison, rows: tuple[Row, ...], longest: int) -> Iterable[str]:
    metric, unit = comparison.headline, comparison.length_unit
    for row in rows:
        if longest not in row.values or row.subject.role == "candidate":
            continue
        value = f"{_amount(row.values[longest], metric)} at {longest} {unit}"
        ahead = [
            other.subject.label
            for other in rows
            if other.subject.role == "candidate"
            and other.rank is not None
            and row.rank is not None
            and other.rank < row.rank
        ]
        beaten = f"beaten by {_list(ahead)}" if ahead else "beaten by no candidate"
        kind = "baseline" if row.subject.role == "baseline" else "control"
        yield f"The {kind} {row.subject.label} reaches {value}, {beaten}."


def _certainty(comparison: Comparison) -> str:
    seeds = comparison.most_seeds
    if seeds == 1:
        return "One seed only: how much of this is chance cannot be said; use at least three."
    count = f"{seeds} seeds" if comparison.complete else f"up to {seeds} seeds"
    return f"All ± are 95 % intervals over {count}."


def _amount(value: Estimate, metric: Metric, *, unit: bool = True) -> str:
    """A value with its interval, and its unit unless it was said before; shares in percent."""
    form, fine = (".1%", ".1%") if metric.is_share else (".3g", ".2g")
    spread = "" if value.half_width is None else f" ± {value.half_width:{fine}}"
    of = metric.unit.removeprefix("share").strip() if unit else ""
    return f"{value.mean:{form}}{spread} {of}".strip()


def _list(names: list[str]) -> str:
    """Names in a sentence: a; a and b; a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
