"""The charts of a comparison's report."""

from __future__ import annotations

import math
from collections.abc import Iterable

from posenc.lab.experiments.results import Comparison, Metric
from posenc.lab.experiments.statistics import bounds_of
from posenc.lab.experiments.summary import Summary
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Across, Drawing, Look, Point, Up, looks
from posenc.lab.reporting.intervals import estimate
from posenc.lab.reporting.numbers import size_in_words

GUIDES = {
    "recall": "A flat loss alone does not show that something far back can still be found.",
    "loss_by_position": "Where a line falls, the model uses the further context; where it jumps, "
    "positions it was not trained at mislead it.",
    "training_loss": "Lines that still fall at the end would gain from more steps.",
}
"""How to read the charts of some metrics."""


WIDE = 2
"""Lengths that are farther apart, as a ratio, are drawn on a log scale."""


def subject_looks(comparison: Comparison) -> dict[str, Look]:
    """Looks of the subjects by their labels."""
    return looks({subject.label: subject.role for subject in comparison.subjects})


def draw_charts(comparison: Comparison, summary: Summary) -> list[Chart]:
    """All charts that the comparison has the measurements for, the deciding one first."""
    names = [row.subject.label for row in summary.rows]
    drawing = Drawing(names, subject_looks(comparison), "encoding")
    deciding = comparison.headline
    measured = {m.metric for m in comparison.measurements}
    metrics = {m.key: m for m in comparison.metrics if m.key in measured and m.key != "seen"}
    charts = []
    if metrics.pop(deciding.key, None):
        charts.append(_curve(drawing, comparison, deciding, _reading_guide(comparison)))
    if recall := metrics.pop("recall", None):
        charts.append(_curve(drawing, comparison, recall, GUIDES["recall"]))
    change = list(_points(comparison, deciding, changed=True))
    if charts and len(comparison.test_lengths) > 1 and change:
        worse = "above" if deciding.lower_is_better else "below"
        how = "in points of a hundred" if deciding.is_share else "as a share of it"
        guide = f"Each run against itself at the training length, {how}: {worse} zero is worse."
        up = Up(
            title="change",
            lower=deciding.lower_is_better,
            percent=True,
            signed=True,
            bounds=bounds_of(deciding, changed=True),
            level=0.0,
        )
        title, axes = "Change from the training length", (_across(comparison, deciding, change), up)
        charts.append(drawing.lines("change", title, guide, change, axes))
    charts += [
        _curve(drawing, comparison, metric, GUIDES.get(metric.key, ""))
        for metric in metrics.values()
    ]
    speeds = [
        {
            "subject": row.subject.label,
            "amount": row.tokens_per_second,
            "peak memory": size_in_words(row.peak_memory_bytes),
            "parameters": f"{row.parameters:,}",
        }
        for row in summary.rows
        if row.tokens_per_second
    ]
    if speeds:
        guide = "Of this machine in this run; only ratios carry over."
        titles = "Speed in training", "tokens a second in training"
        charts.append(drawing.amounts("cost", titles, guide, speeds))
    return charts


def _reading_guide(comparison: Comparison) -> str:
    """How to read the first chart."""
    notes = [f"{'Lower' if comparison.headline.lower_is_better else 'Higher'} is better"]
    if len(comparison.test_lengths) > 1:
        notes.append("shaded: the trained length")
    if comparison.most_seeds > 1:
        notes.append("bands: 95 % over seeds")
    if any(subject.role != "candidate" for subject in comparison.subjects):
        notes.append("grey: for comparison")
    return f"{'; '.join(notes)}."


def _curve(drawing: Drawing, comparison: Comparison, metric: Metric, guide: str) -> Chart:
    """The chart of a metric along its axis."""
    points = list(_points(comparison, metric))
    up = Up(
        title=metric.unit,
        lower=metric.lower_is_better,
        percent=metric.is_share,
        zero=metric.is_share,  # of shares, none is left to be guessed
        bounds=bounds_of(metric),
        level=metric.trivial,
        level_name=metric.trivial_rule,
    )
    first = metric.headline
    return drawing.lines(
        "headline" if first else metric.key,
        metric.label,
        f"{metric.description} {guide}".strip(),
        points,
        (_across(comparison, metric, points), up),
        first=first,
    )


def _across(comparison: Comparison, metric: Metric, points: Iterable[Point]) -> Across:
    lengths = comparison.test_lengths
    return Across(
        title=metric.axis,
        trained=None if metric.key == "training_loss" else comparison.train_length,
        lengths=lengths if {point.x for point in points} <= set(lengths) else (),
        log=lengths[-1] > WIDE * lengths[0],
    )


def _points(comparison: Comparison, metric: Metric, *, changed: bool = False) -> Iterable[Point]:
    """Means and intervals by subject and place, with the value of every seed.

    Changes are from the training length: differences of shares, else shares of the base.
    """
    form = ".1%" if metric.is_share or changed else None
    bounds = bounds_of(metric, changed=changed)
    labels = {subject.name: subject.label for subject in comparison.subjects}
    places: dict[tuple[str, float], dict[int, float]] = {}
    for m in comparison.measurements:
        if m.metric == metric.key:
            places.setdefault((m.subject, m.x), {})[m.seed] = m.value
    for (name, x), values in sorted(places.items()):
        if changed:
            base = places.get((name, comparison.train_length), {})
            parts = {s: 1.0 if metric.is_share else base[s] for s in values if s in base}
            values = {s: (values[s] - base[s]) / part for s, part in parts.items() if part}
        runs = tuple(value for value in values.values() if math.isfinite(value))
        point = estimate(runs, bounds)
        if point is not None:
            runs = runs if point.n > 1 else ()
            yield Point(labels[name], x, point, point.shown(form), runs)
