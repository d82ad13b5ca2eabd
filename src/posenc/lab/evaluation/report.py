"""The report of a study: a page, its charts as pictures, and all numbers as JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posenc.lab.evaluation.candidates import CUT, WINDOW
from posenc.lab.evaluation.choosing import best, gaps, short_cost, worse_by
from posenc.lab.evaluation.questions import TASKS
from posenc.lab.evaluation.results import Findings, KeyTokens, Study, StudyReading
from posenc.lab.evaluation.summary import answer, opening, when
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Across, Drawing, Point, Up, looks
from posenc.lab.reporting.judge import Metric
from posenc.lab.reporting.measurements import MeasuredValue
from posenc.lab.reporting.numbers import (
    SHARES,
    UNBOUNDED,
    Bounds,
    Estimate,
    counted,
    estimate,
    size_in_words,
)
from posenc.lab.reporting.page import (
    Cell,
    MapSection,
    Page,
    TableColumn,
    TableSection,
    Term,
    TextSection,
    write_files,
)
from posenc.storage import make_folder


def write_study(study: Study, folder: Path) -> Path:
    """Write ``index.html``, charts, ``study.json`` and ``measurements.csv``; the page's path.

    Raises:
        OutputError: if the folder cannot be written to.
    """
    make_folder(folder)
    write_files(folder, study_page(study), {"study.json": study.to_json()})
    return folder / "index.html"


def study_page(study: Study) -> Page:
    """The page with its charts."""
    stretched = study.factor != 1.0
    roles = {
        method.key: _role(method, study)
        for method, _ in (*study.ranked(tuned=study.tuned), *study.ranked())
    }
    styles = looks(roles)
    drawing = Drawing(list(roles), styles, "method")
    reasons = TextSection(key="findings", title="Reasons", lists=(("", answer(study)),))
    return Page(
        facts=(
            f"posenc {'extend' if stretched else 'evaluate'} · {study.checkpoint} · {study.family}",
            f"trained at {study.at(study.length)}, measured at up to {study.called(study.goal)}",
            study.text,
        ),
        opening=opening(study),
        charts=list(_charts(study, drawing)),
        looks=styles,
        sections=[
            *([reasons] if answer(study) else []),
            *tables(study),
            *(_maps(study, tuned=tuned) for tuned in study.whens if study.depths),
            _names(study),
        ],
        values=tuple(_values(study)),
        command=study.command,
        settings={
            **({"parameters": f"{study.parameters:,}"} if study.parameters else {}),
            "images" if study.unit == "pixel" else "text": study.text,
            "sha256": study.sha256,
            "seed": f"{study.seed} (one: how much is chance cannot be said)",
            **{f"fine-tuning {name}": value for name, value in study.finetune.items()},
            "device": study.device
            + (f", {counted(study.threads, 'thread')}" if study.threads else ""),
            "versions": " · ".join(f"{name} {value}" for name, value in study.versions.items()),
            "made": f"{study.created}, in {study.seconds:.0f} s",
        },
        note="Beside this page: every chart as PNG and SVG, study.json, measurements.csv. "
        "Times and memory are of this machine in this run; only their ratios carry over.",
    )


def _role(method: Findings, study: Study) -> str:
    """Role of a method in charts, where a model measured as it is has the colour."""
    if method.role == "method" or (study.factor == 1.0 and method.key == study.findings[0].key):
        return "candidate"
    return "control" if method.key == "direct" else "baseline"


def _charts(study: Study, drawing: Drawing) -> Iterator[Chart]:
    """All charts, the deciding one first."""
    title = f"{'context' if study.causal else 'text'} length ({study.unit}s)"
    if study.unit == "pixel":
        title = f"size (pixels{', the longer side' if study.labels else ' a side'})"
    by_length = Across(title=title, trained=study.length, lengths=study.lengths, log=True)
    by_position = Across(title=f"position ({study.unit}s)", trained=study.length)
    at_position = (
        f"In contexts of {study.goal}, the same {study.unit}s at every position. A line that jumps "
        "beyond the shaded range is misled by positions it was not trained at; one that goes on "
        "falling uses the farther context."
    )
    for tuned in study.whens:
        end, ending = "-tuned" if tuned else "", when(study, tuned=tuned)
        readings = study.readings(tuned=tuned)
        for metric in study.metrics:
            deciding = metric == study.deciding
            up = Up(
                title=metric.unit,
                lower=metric.lower_is_better,
                percent=metric.is_share,
                zero=metric.is_share,
                bounds=SHARES if metric.is_share else Bounds(0.0),
                level=study.trivial if deciding else None,
                level_name=study.trivial_rule,
            )
            if metric.label:
                values = {key: reading.of(metric).items() for key, reading in readings.items()}
                yield drawing.lines(
                    f"{metric.key}{end}",
                    f"{metric.label}{ending}",
                    metric.description,
                    _points(values, metric),
                    (by_length, up),
                    first=deciding and tuned == study.tuned,
                )
            if metric.key == "loss":
                along = _points({k: r.by_position for k, r in readings.items()}, metric)
                chart = f"position{end}", f"Loss by position{ending}", at_position
                if along:  # masked tokens are measured by length alone
                    yield drawing.lines(*chart, along, (by_position, up))


def _points(values: Mapping[str, Iterable[tuple[float, float]]], metric: Metric) -> list[Point]:
    """Points of a metric, from values by name and place."""
    form = ".1%" if metric.is_share else ".3f"
    return [
        Point(key, x, Estimate(value, None, 1), f"{value:{form}}")
        for key, pairs in values.items()
        for x, value in pairs
    ]


MOST_LENGTHS = 5
"""Lengths that a table on a terminal has room for."""


def tables(study: Study) -> list[TableSection]:
    """All results, after fine-tuning first, and answers to questions."""
    results = [_table(study, tuned=tuned) for tuned in study.whens]
    keys = [_key_tokens(study.key_tokens, study)] if study.key_tokens else []
    return [*results, *keys, *([_answers(study)] if study.answers else [])]


def _on_terminal(study: Study, metric: Metric, length: int) -> str | None:
    """The head of a column on a terminal: the last length; of the deciding metric those that count.

    Returns:
        None if it has none there.
    """
    if metric != study.deciding:
        return metric.noun if length == study.goal else None
    found = study.effective
    ends = () if found is None else (found.reference, found.length, found.end)
    counting = {study.lengths[0], study.length // 2, study.length, study.goal, *ends}
    shown = len(study.lengths) <= MOST_LENGTHS or length in counting
    return f"at {study.called(length)}" if shown else None


def _table(study: Study, *, tuned: bool) -> TableSection:
    """All results, a row a model."""
    deciding, first_and_last = study.deciding, study.lengths[:: len(study.lengths) - 1 or 1]
    measured = [
        (metric, length)
        for metric in study.metrics
        for length in (first_and_last if metric.brief else study.lengths)
    ]
    ranked = study.ranked(tuned=tuned)
    costs = {method.key: short_cost(study, each, tuned=tuned) for method, each in ranked}
    has_costs = any(cost is not None for cost in costs.values())
    has_memory = any(each.peak_memory_bytes for _, each in ranked)
    chosen = best(study, tuned=tuned) if tuned == study.tuned and study.factor != 1.0 else None
    deficits = gaps(study, chosen) if chosen is not None else {}
    points = 100 if deciding.is_share else 1

    def cells(method: Findings, reading: StudyReading) -> Iterator[Cell]:
        written = method.key == study.chosen and tuned == study.tuned
        small = "baseline" if method.role == "baseline" else "written" if written else ""
        yield Cell(text=method.key, small=small, value=method.key, kind="name")
        for metric, length in measured:
            value = reading.of(metric)[length]
            yield Cell(text=metric.shown(value), value=value)
        if deficits:
            deficit = deficits.get(method.key)
            yield Cell.of(deficit and deficit.scaled(points), ".3f" if points == 1 else ".1f")
        if has_costs:
            yield Cell(text=worse_by(study, costs[method.key]), value=costs[method.key])
        yield Cell(text=reading.speed, value=reading.per_second)
        if has_memory:
            memory = reading.peak_memory_bytes
            yield Cell(text=size_in_words(memory), value=memory)
        if tuned:
            yield Cell(text=f"{reading.seconds:.1f} s", value=reading.seconds)

    return TableSection(
        key=f"table{'-tuned' if tuned else ''}",
        title=f"All results{when(study, tuned=tuned)}",
        guide=study.guide,
        columns=(
            TableColumn(name="method", text=True),
            *(
                TableColumn(
                    name=study.called(length),
                    group=f"{metric.noun} at",
                    note="trained" if length == study.length and metric == deciding else "",
                    short=_on_terminal(study, metric, length),
                )
                for metric, length in measured
            ),
            *(
                [
                    TableColumn(
                        name="behind", note=f"{chosen}, in pairs of {study.sample}", short=None
                    )
                ]
                if deficits
                else []
            ),
            *([TableColumn(name="short texts", note="against the original")] if has_costs else []),
            TableColumn(name=f"{study.counted}/s"),
            *([TableColumn(name="memory", short=None)] if has_memory else []),
            *([TableColumn(name="tuning", short=None)] if tuned else []),
        ),
        rows=tuple(tuple(cells(*pair)) for pair in ranked),
        notes=tuple(
            (method.key, f"was not fine-tuned: {method.failed}")
            if tuned
            else (method.key, f"does not go: {method.refusal}.")
            for method in study.findings
            if (method.failed if tuned else method.refusal)
        ),
        marked=study.chosen if tuned == study.tuned else None,
    )


ASKED = {
    "chat": "generated by its chat template",
    "base": "each token of an answer the likeliest",
    "written": "written after the beginning of the answer",
}
"""Meaning of a right answer, by the style of the questions."""


def _answers(study: Study) -> TableSection:
    """Shares of right answers by task and length, of a model measured as it is."""

    def cell(share: float | None) -> Cell:
        return Cell(text="—") if share is None else Cell(text=f"{share:.0%}", value=share)

    names = {name: TASKS[name].summary for name in study.answers}
    return TableSection(
        key="answers",
        title="Questions answered right, by task",
        guide=f"Mean share of right answers, {ASKED.get(study.style, '')}. Tasks with hardly any "
        "at the trained length are not asked at others.",
        columns=(
            TableColumn(name="task", text=True),
            *(
                TableColumn(name=name, group="length", short=f"at {name}")
                for name in map(study.called, study.asked_at)
            ),
        ),
        rows=tuple(
            (
                Cell(text=name, small=names[name], value=name, kind="name"),
                *(cell(shares.get(length)) for length in study.asked_at),
            )
            for name, shares in study.answers.items()
        ),
        notes=tuple(study.left_out.items()),
    )


def _key_tokens(measured: KeyTokens, study: Study) -> TableSection:
    """Loss and perplexity of key tokens and of all that were looked at, by length."""

    def row(
        name: str, small: str, values: Mapping[int, float], errors: Mapping[int, float]
    ) -> tuple[Cell, ...]:
        """Means with their intervals."""
        cells = [
            Cell.of(Estimate(values[n], errors.get(n), measured.segments), ".3f")
            if n in values
            else Cell(text="—")
            for n in measured.every
        ]
        return Cell(text=name, small=small, value=name, kind="name"), *cells

    def perplexity(estimate: Estimate) -> Cell:
        """Perplexity of a mean, and of the ends of its interval."""
        mean, low, high = (2**bits for bits in (estimate.mean, estimate.low, estimate.high))
        known = estimate.half_width is not None
        small = f"({low:.3f} to {high:.3f})" if known else ""
        return Cell(text=f"{mean:.3f}", small=small, value=mean)

    estimates = measured.estimates()
    perplexities = [
        perplexity(estimates[n]) if n in estimates else Cell(text="—") for n in measured.every
    ]
    unit, count = study.unit, f"{measured.count:,} of {measured.tokens:,}"
    return TableSection(
        key="key-tokens",
        title="Loss on key tokens",
        guide=f"Key: {count} {unit}s, whose log-probability rises by more than 2 nats to more than "
        f"-2 from a context of {measured.short} to one of {measured.reference} (LongPPL, Fang et "
        f"al. 2024). In parentheses: 95 % intervals over segments, {measured.segments} with key "
        f"{unit}s.",
        columns=(
            TableColumn(name=f"{unit}s", text=True),
            *(
                TableColumn(name=study.called(n), group="length", short=f"at {study.called(n)}")
                for n in measured.every
            ),
        ),
        rows=(
            row("key", f"bits per {unit}", measured.loss, measured.loss_error),
            (
                Cell(text="LongPPL", small="perplexity of these", value="LongPPL", kind="name"),
                *perplexities,
            ),
            row("all", f"bits per {unit}", measured.every, measured.every_error),
        ),
    )


def _maps(study: Study, *, tuned: bool) -> MapSection:
    """Shares of needles by depth and length."""
    metric = next(metric for metric in study.metrics if metric.key == "needles")
    return MapSection(
        key=f"needles-maps{'-tuned' if tuned else ''}",
        title=f"{metric.noun.capitalize()} by depth and length{when(study, tuned=tuned)}",
        guide=f"Each cell is the share found of {study.asked}: {study.needles}. Down: where it "
        f"stood, from the beginning to the end. Across: length in {study.unit}s. A guess finds "
        f"{100 * study.chance:.2g}%.",
        corner="depth",
        rows=tuple(f"{depth:.0%}" for depth in study.depths),
        columns=tuple(map(str, study.lengths)),
        shares={
            method.key: [
                [reading.needles[length][place] for length in study.lengths]
                for place in range(len(study.depths))
            ]
            for method, reading in study.ranked(tuned=tuned)
        },
    )


def _names(study: Study) -> TextSection:
    """Names in tables and charts: claims and advice of methods, and a line on the others."""
    trained, longer = study.at(study.length), study.goal > study.length
    others = {
        study.findings[0].key: f"{study.checkpoint} as it is.",
        WINDOW: f"The same with attention cut to the last {trained}, as a control.",
        **({CUT: f"Given {trained} of longer texts."} if longer else {}),
        **({"interpolate": "Its table is interpolated for larger images."} if longer else {}),
    }
    terms = []
    for method in study.findings:
        claims = [f"{one.summary} {one.expect} {one.cite}".strip() for one in method.claims]
        text = (*claims, *method.advice) or (others.get(method.key, ""),)
        served = f"in transformers: {method.served}" if method.served else "in posenc alone"
        note = served if method.claims else ""
        terms.append(Term(name=method.key, note=note, text=text))
    return TextSection(key="rows", title="What the names mean", terms=tuple(terms))


def _values(study: Study) -> Iterator[MeasuredValue]:
    """All numbers, a row each."""
    for tuned in reversed(study.whens):
        for method, reading in study.ranked(tuned=tuned):
            run = f"{method.key}, fine-tuned" if tuned else method.key
            yield from _values_of(study, reading, {"model": study.checkpoint, "method": run})
    if study.key_tokens:
        facts: dict[str, Any] = {"model": study.checkpoint, "method": study.findings[0].key}
        facts |= {"metric": "key_token_loss"}
        for length, over in study.key_tokens.estimates().items():
            measured = MeasuredValue.of(over, length=length, **facts)
            yield replace(measured, count=study.key_tokens.count)


def _values_of(
    study: Study, reading: StudyReading, facts: Mapping[str, Any]
) -> Iterator[MeasuredValue]:
    """The numbers of a model; ``facts`` are fields of all their rows."""
    goal = study.goal
    for metric in study.metrics:
        bounds = SHARES if metric.is_share else UNBOUNDED
        pieces = reading.pieces.get(metric.key, {})
        for length, value in reading.of(metric).items():
            over = estimate(pieces.get(length, (value,)), bounds)
            assert over is not None  # each length has a value
            over = replace(over, mean=value)
            yield MeasuredValue.of(over, metric=metric.key, length=length, **facts)
    for place, value in reading.by_position:
        yield MeasuredValue(metric="loss_by_position", length=goal, at=place, value=value, **facts)
    for length, shares in reading.needles.items():
        for depth, share in zip(study.depths, shares, strict=True):
            by: dict[str, Any] = {"metric": "needles_by_depth", "length": length, "at": depth}
            yield MeasuredValue(value=share, count=study.asked, **by, **facts)
    for name, by_length in reading.tasks.items():
        for length, shares in by_length.items():
            right = estimate(shares, SHARES)
            assert right is not None  # a task without questions is left out
            yield MeasuredValue.of(right, metric=name, length=length, **facts)
    costs = {f"{study.counted}_per_second": reading.per_second}
    if reading.peak_memory_bytes:
        costs["peak_memory_bytes"] = reading.peak_memory_bytes
    for name, cost in costs.items():
        yield MeasuredValue(metric=name, length=goal, value=cost, **facts)
