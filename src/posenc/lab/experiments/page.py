"""The page of a comparison's report and its charts, from its records and the summary of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from posenc.lab.experiments.results import Comparison
from posenc.lab.experiments.summary import Summary
from posenc.lab.experiments.verdicts import Row, longest_measured, reason
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Across, Drawing, Look, Point, Up, looks
from posenc.lab.reporting.judge import Metric, held
from posenc.lab.reporting.measurements import MeasuredValue
from posenc.lab.reporting.numbers import (
    UNBOUNDED,
    count_in_words,
    counted,
    estimate,
    sentence,
    size_in_words,
)
from posenc.lab.reporting.opening import Opening, Verdict, Verdicts, defined, length_words, meanings
from posenc.lab.reporting.page import Cell, Page, TableColumn, TableSection, Term, TextSection

HOW = (
    "One model an encoding and seed, with the same budget of steps. A seed fixes the data's order "
    "and all initial weights but the encoding's own, so that two encodings are compared seed by "
    "seed, and what they have in common cancels. Intervals are Student's t over seeds at 95 %. The "
    "verdict of the table is the worst of those on each metric, and unsure where nothing is found "
    "even at the training length."
)


def comparison_page(comparison: Comparison, summary: Summary) -> Page:
    """The page with its charts."""
    provenance = comparison.provenance
    expected = ("Expected from the literature", (comparison.expectation,))
    lists = [("", summary.answer), *([expected] if comparison.expectation else [])]
    reasons = TextSection(key="findings", title="Reasons", lists=tuple(lists))
    method = TextSection(
        key="method",
        title="How this was measured",
        paragraphs=(HOW,),
        terms=(
            *(Term(name=m.label, note=m.unit, text=(m.description,)) for m in comparison.metrics),
            *(
                Term(name=s.label, note=s.role, text=(s.note,))
                for s in comparison.subjects
                if s.note
            ),
        ),
    )
    return Page(
        facts=tuple(_facts(comparison)),
        opening=opening(comparison, summary),
        charts=draw_charts(comparison, summary),
        looks=_subject_looks(comparison),
        sections=(
            results_table(comparison, summary),
            *([reasons] if summary.answer or comparison.expectation else []),
            method,
        ),
        values=tuple(_values(comparison)),
        command=provenance.command,
        settings={
            "corpus": _corpus(comparison),
            "sha256": provenance.corpus.sha256,
            "seeds": provenance.seeds,
            "device": f"{provenance.device}, {counted(provenance.threads, 'thread')} a process",
            "versions": " · ".join(f"{n} {value}" for n, value in provenance.versions.items()),
            **provenance.settings,
            "made": provenance.created,
        },
        note="Beside this page: every chart as PNG and SVG, comparison.json, measurements.csv.",
    )


COSTS = ("tokens_per_second", "peak_memory_bytes", "parameters", "train_seconds")
"""Fields of ``TrainedRun`` that are measurements."""


def _values(comparison: Comparison) -> Iterator[MeasuredValue]:
    """Means over seeds by metric and length, position or step, and costs, a row each."""
    seeds: dict[tuple[str, str, float], list[float]] = {}
    for each in comparison.measurements:
        seeds.setdefault((each.subject, each.metric, each.x), []).append(each.value)
    for run in comparison.runs:
        for key in COSTS:
            cost = float(getattr(run, key))
            seeds.setdefault((run.subject, key, comparison.train_length), []).append(cost)
    lengths = set(comparison.test_lengths)
    along = {key for _, key, x in seeds if x not in lengths}  # positions, or steps of training
    for (subject, key, x), values in seeds.items():
        metric = comparison.metric(key)
        over = estimate(values, UNBOUNDED if metric is None else metric.bounds())
        assert over is not None  # each has a value
        model, _, method = subject.partition("|")
        facts: dict[str, Any] = {"model": model, "method": method, "metric": key}
        yield MeasuredValue.of(over, **facts, **{"at" if key in along else "length": x})


def opening(comparison: Comparison, summary: Summary) -> Opening:
    """The headline, verdicts by loss and by recall, and ways to settle what is open."""
    metric, recall = comparison.headline, comparison.metric("recall")
    longest = longest_measured(comparison, summary.rows)
    rows = [
        Verdict(
            name=row.subject.label,
            words=(row.predicts, row.finds or "") if recall else (row.predicts,),
            why=reason(comparison, row),
            note=row.subject.note,
            reference=row.subject.role != "candidate",
        )
        for row in summary.rows
    ]
    several = len(comparison.test_lengths) > 1
    definitions = length_words(f"at {comparison.train_length}")
    definitions["unlearned"] = "; ".join(
        sentence("means_unlearned", metric=each)
        for each in (metric, recall)
        if each and (each.learned, each.trivial) != (None, None)
    )
    if metric.overfit is not None:
        net = f", net of what {metric.rule} does," if metric.rule else ""
        more = f"more than {metric.overfit} {metric.unit} better{net}"
        definitions["overfitted"] = f"{more} on data it was trained on"
    words = (word for row in summary.rows for word in (row.predicts, row.finds or "", row.verdict))
    return Opening(
        headline=summary.headline,
        verdicts=Verdicts(
            title=f"Verdicts at {longest} {comparison.length_unit}",
            columns=(metric.noun, *([recall.noun] if recall else [])),
            rows=tuple(rows),
            guide=defined(definitions, "holds", "breaks") if several else "",
            meanings=meanings(words, definitions),
        ),
        remedies=summary.remedies,
    )


def _facts(comparison: Comparison) -> Iterator[str]:
    """The task, the lengths, the seeds and the data."""
    lengths = comparison.test_lengths
    longer = f", tested at up to {lengths[-1]}" if len(lengths) > 1 else ""
    yield f"posenc compare · {comparison.title}"
    yield f"trained at {comparison.train_length} {comparison.length_unit}{longer}"
    if comparison.complete:
        yield counted(comparison.most_seeds, "seed")
    else:
        yield f"unfinished: {len(comparison.runs)} runs so far"
    yield comparison.provenance.corpus.name


def _corpus(comparison: Comparison) -> str:
    """The data with their sizes."""
    corpus = comparison.provenance.corpus
    text = corpus.name + (f": {counted(corpus.files, 'file')}" if corpus.files else "")
    if corpus.train_bytes:
        text += f", {corpus.train_bytes:,} {corpus.unit} to train on"
        text += f", {corpus.held_out_bytes:,} held out"
    return text


def results_table(comparison: Comparison, summary: Summary) -> TableSection:
    """All results, a row a subject."""
    metric, recall, train = (
        comparison.headline,
        comparison.metric("recall"),
        comparison.train_length,
    )
    recalled = sorted({length for row in summary.rows for length in row.recall})
    longest = longest_measured(comparison, summary.rows)
    form, points = (".1%", 100) if metric.is_share else (None, 1)
    measured = [
        TableColumn(
            name=str(length),
            group=f"{metric.unit} at",
            note="trained" if length == train else "",
            short=f"at {length}",
        )
        for length in comparison.test_lengths
    ]
    if recall is not None:
        measured += [
            TableColumn(
                name=str(length),
                group=f"{recall.label.lower()} at",
                short=f"{recall.noun} at {length}" if length == recalled[-1] else None,
            )
            for length in recalled
        ]

    def cells(row: Row) -> Iterator[Cell]:
        label, role = row.subject.label, row.subject.role
        yield Cell(text=str(row.rank or "–"), kind="rank", value=row.rank)
        named = {"value": label, "kind": "name", "title": row.subject.note}
        yield Cell(text=label, small="" if role == "candidate" else role, **named)
        last = held(row.values, metric, train) if train in row.values else train
        small = f"holds up to {last}" if row.predicts != "holds" and last > train else ""
        why = reason(comparison, row)
        yield Cell(text=row.verdict, small=small, value=row.verdict, kind="verdict", title=why)
        for length in comparison.test_lengths:
            if length in row.refusals and length not in row.values:
                yield Cell(text="cannot", kind="refused", title=row.refusals[length])
            else:
                yield Cell.of(row.values.get(length), form)
        for length in recalled:
            yield Cell.of(row.recall.get(length), ".1%")
        yield Cell.of(row.behind and row.behind.scaled(points))
        speed, memory, size = row.tokens_per_second, row.peak_memory_bytes, row.parameters
        yield Cell(text=count_in_words(speed), value=speed)
        yield Cell(text=size_in_words(memory), value=memory)
        yield Cell(text=count_in_words(size), value=size)

    return TableSection(
        key="table",
        title="All results",
        guide=f"{metric.label} ({metric.unit}), with 95 % intervals over seeds; best at the "
        "longest length first. Encodings that share a rank cannot be told apart by their paired "
        "seeds.",
        columns=(
            TableColumn(name="#", text=True),
            TableColumn(name="encoding", text=True),
            TableColumn(name="verdict", text=True, short=None),
            *measured,
            TableColumn(name="behind", note=f"the first, at {longest}, seed by seed", short=None),
            *(TableColumn(name=name, short=None) for name in ("tokens/s", "memory", "parameters")),
        ),
        rows=tuple(tuple(cells(row)) for row in summary.rows),
        notes=tuple(
            (
                row.subject.label,
                f"at {', '.join(map(str, row.refusals))}: "
                f"{'; '.join(dict.fromkeys(row.refusals.values()))}.",
            )
            for row in summary.rows
            if row.refusals and row.gate is None
        ),
    )


GUIDES = {
    "recall": "A flat loss alone does not show that something far back can still be found.",
    "loss_by_position": "Where a line falls, the model uses the further context; where it jumps, "
    "positions it was not trained at mislead it.",
    "training_loss": "Lines that still fall at the end would gain from more steps.",
}
"""How to read the charts of some metrics."""


WIDE = 2
"""Lengths that are farther apart, as a ratio, are drawn on a log scale."""


def _subject_looks(comparison: Comparison) -> dict[str, Look]:
    """Looks of the subjects by their labels."""
    return looks({subject.label: subject.role for subject in comparison.subjects})


def draw_charts(comparison: Comparison, summary: Summary) -> list[Chart]:
    """All charts that the comparison has the measurements for, the deciding one first."""
    names = [row.subject.label for row in summary.rows]
    drawing = Drawing(names, _subject_looks(comparison), "encoding")
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
            bounds=deciding.bounds(changed=True),
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
        bounds=metric.bounds(),
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
    bounds = metric.bounds(changed=changed)
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
