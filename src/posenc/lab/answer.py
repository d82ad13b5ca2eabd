"""What came out of a comparison, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from posenc.lab.results import Comparison, Metric
from posenc.lab.statistics import (
    Estimate,
    Row,
    held,
    judged,
    longest_measured,
    paired_difference,
)

__all__ = ["Summary", "summarise"]

MANIFOLD = 3.0
"""From four times as much on, a change is told as a multiple."""


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
    rows = judged(comparison)
    return Summary(rows=rows, answer=tuple(_answer(comparison, rows)))


def _answer(comparison: Comparison, rows: tuple[Row, ...]) -> Iterable[str]:
    metric, train = comparison.headline, comparison.train_length
    longest = longest_measured(comparison, rows)
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
    kept = held(row, metric, train)
    if row.verdict != "holds" and kept > train:
        said.append(f"holds up to {kept}")
    return f"{shown} → {after}" + (f" ({', '.join(said)})" if said else "")


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
