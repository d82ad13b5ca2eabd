"""The report of a diagnosis: a page, its charts as pictures, and all of it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from posenc.lab.doctor.words import Engines, descriptions, difference_of, short_titles, titles
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Across, Drawing, Point, Up, looks
from posenc.lab.reporting.measurements import MeasuredValue
from posenc.lab.reporting.numbers import Estimate, counted, listed, size_in_words, time_in_words
from posenc.lab.reporting.opening import (
    Opening,
    Remedy,
    Verdict,
    Verdicts,
    defined,
    fitting,
    meanings,
    shortened,
)
from posenc.lab.reporting.page import (
    Cell,
    Page,
    TableColumn,
    TableSection,
    TextSection,
    write_files,
)
from posenc.transformers.checkpoints import Fields
from posenc.transformers.doctor.advice import FACTOR, REFUSED, Advice, config_lines
from posenc.transformers.doctor.costs import LayerCost
from posenc.transformers.doctor.diagnosis import Diagnosis
from posenc.transformers.doctor.facts import UNKNOWN, AttentionFacts, RotationFacts
from posenc.transformers.engines.config import ModelConfig, NotServedError
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.hub import model_folder

NAME = 24
"""Characters of a name in a headline, at most."""

COSTS = {"transformers": "baseline", "with posenc": "candidate"}
"""Lines of the charts of costs, and their roles."""

COST_COLUMNS = ("tokens", "transformers", "memory", "with posenc", "memory")
IN_WORDS = ("what was found", "pairs that differ")
"""Columns of text."""

COST_GUIDE = "One layer, forward, one row, this machine (≈ computed from shorter inputs)."

NOT_ASKED = Engines((), None)
"""Comparison without engines."""

Line = tuple[str, Sequence[float]]
"""A name, and frequencies in radians a token."""


LIMITED = {
    "holds": "positions are defined there, and nothing says that they were not trained",
    "degrades": "positions are defined, but such distances were never trained",
    "breaks": "there is no position for a further token",
    "unknown": "could not be read from the model's code or config",
    "same": "rotates as transformers does",
    "differs": "rotates otherwise than transformers",
    "refuses": "does not start with this config",
}
"""Definitions of the words."""


def opening(diagnosis: Diagnosis, folder: Path, engines: Engines | None = None) -> Opening:
    """A word on each kind of layer up to the limit and beyond it, and on each engine."""
    limits, reading, asked = diagnosis.limits, diagnosis.reading, engines or NOT_ASKED
    spans = {
        title: _span(layers.attention, limited=bool(limits))
        for title, layers in zip(short_titles(reading), reading.layers, strict=True)
    }
    spans |= {table.module: ("holds", "breaks") for table in reading.tables}
    engine_words = asked.words()
    columns: tuple[str, ...] = ("at any length",)
    if limits:
        columns = (f"to {limits[0].tokens:,} tokens", "beyond")
    differences = {one.engine: difference_of(one) for one in asked.served}
    # without a limit the word on any length is that on longer texts
    rows = [Verdict(name=name, words=words[-len(columns) :]) for name, words in spans.items()]
    judged = [word for row in rows for word in row.words]
    rows += [
        Verdict(
            name=name,
            words=words[: len(columns)],
            why=f"{name} {differences[name]}." if words[0] != "same" else "",
            reference=True,
        )
        for name, words in engine_words.items()
    ]
    ends = [word for word in ("holds", "degrades", "breaks", "unknown") if word in judged]
    return Opening(
        headline=_headline(diagnosis, folder, asked, [*chain(*spans.values())]),
        verdicts=Verdicts(
            title="Verdicts by layer" + (" and engine" if engine_words else ""),
            columns=columns,
            rows=tuple(rows),
            guide=defined(LIMITED, *ends) if ends else f"{NO_LAYERS}.",
            meanings=meanings((word for row in rows for word in row.words), LIMITED),
        ),
        remedies=tuple(_remedies(diagnosis.advice, asked)),
    )


def _span(facts: AttentionFacts, *, limited: bool) -> tuple[str, str]:
    """A word on texts up to the limit, and one on longer ones."""
    if facts.rotation == UNKNOWN:
        return "unknown", "unknown"
    if not isinstance(facts.rotation, RotationFacts) or facts.unlimited is False:
        return "holds", "holds"
    return "holds", "degrades" if limited and facts.unlimited is True else "unknown"


def _headline(diagnosis: Diagnosis, folder: Path, engines: Engines, words: Sequence[str]) -> str:
    name, method = shortened(folder.resolve().name, NAME), diagnosis.advice.method
    if diagnosis.advice.why == REFUSED:
        return f"Correct the config of {name}: transformers refuses it"
    if diagnosis.limits:
        text = f"Up to {diagnosis.limits[0].tokens:,} tokens take {name} as it is"
        text += f", beyond them {method}" if method else "; beyond, no method is advised"
    elif not words or "unknown" in words:
        text = f"How long the texts of {name} may be is not known"
    else:
        text = f"Take {name} as it is: nothing in it limits the length"
    count = sum(not one.unread for one in diagnosis.findings)
    mend = f"; mend {counted(count, 'setting')} first" if count else ""
    unlike, endings = engines.unlike, []
    if unlike:
        differ = "differ" if len(unlike) > 1 else "differs"
        endings = [f"; {who} {differ}" for who in (listed(unlike), counted(len(unlike), "engine"))]
    return fitting(text + end for end in (*(mend + end for end in endings), mend, *endings, ""))


def _remedies(advice: Advice, engines: Engines) -> Iterator[Remedy]:
    if engines.remedy is not None:
        rotate = "rotate" if len(engines.unlike) > 1 else "rotates"
        where = "more engines" if engines.remedy.left else "all engines"
        text = f"{listed(engines.unlike)} {rotate} otherwise: write the lines right in {where}"
        yield Remedy(text=f"{text}, below.")
    if advice.command:
        served = f" --for {engines.alone}" if engines.alone else ""
        text = f"To extend it by {advice.method} and measure what that gains:"
        yield Remedy(text=text, command=advice.command + served * bool(advice.config))
    elif advice.config:
        text = f"For longer texts, write the lines of {advice.method} below into config.json."
        yield Remedy(text=text)


NO_LAYERS = "The config does not tell its layers, so that none is judged"


def facts_table(diagnosis: Diagnosis, engines: Engines | None) -> TableSection:
    """Table of facts: the reading, layers, limits, advice, settings without effect, engines."""
    reading, advice, asked = diagnosis.reading, diagnosis.advice, engines or NOT_ASKED
    how = "by running its code, without weights" if reading.by == "run" else "from its config"
    rows = [("read", ": ".join(filter(None, (how, reading.reason.rstrip(".")))))]
    rows += zip(titles(reading), map("; ".join, descriptions(reading)), strict=True)
    rows += [] if reading.layers else [("layers", NO_LAYERS)]
    rows += [(table.module, f"a table of {table.rows:,} positions") for table in reading.tables]
    rows += [
        (f"{one.beyond} beyond", f"{one.tokens:,} tokens: {one.why}") for one in diagnosis.limits
    ]
    rows.append(("advice", f"{advice.method or 'no extension'}, {advice.why}"))
    findings = diagnosis.findings
    rows += [(one.field, f"{one.problem}. Write {one.change}.") for one in findings]
    rows += [] if findings else [("settings", "none without effect was found")]
    if engines is not None:
        rows += [(f"engines: {name}", text) for name, text in asked.facts(reading)]
    rows.append(("acceleration", diagnosis.acceleration))
    rows += [("CPU kernels", diagnosis.kernels)] if diagnosis.costs else []
    return _table("facts", "Facts", "", ("fact", "what was found"), rows)


def tables(diagnosis: Diagnosis, engines: Engines | None) -> Iterator[TableSection]:
    """Facts, the rotations in engines, and costs."""
    yield facts_table(diagnosis, engines)
    if engines is not None and engines.served:
        guide = f"{engines.origin()} Longest texts are those that they take unless told otherwise."
        yield _table("engines", "Engines", guide, *engines.table())
    if diagnosis.costs:
        yield _table("costs", "Costs of a layer", COST_GUIDE, COST_COLUMNS, _costs(diagnosis))


def lines_to_write(diagnosis: Diagnosis, engines: Engines | None) -> dict[str, str]:
    """Lines of config.json by what they are for: longer texts, and other engines."""
    lines = {f"{diagnosis.advice.method}, for transformers": config_lines(diagnosis.advice)}
    remedy = engines and engines.remedy
    if remedy:
        right = f"right in {'more engines' if remedy.left else 'all'}"
        lines[right] = json.dumps(remedy.changes, indent=2)[2:-2].split("\n")
    return {f"In config.json: {name}": "\n".join(text) for name, text in lines.items() if text}


def write_diagnosis(
    diagnosis: Diagnosis, folder: Path, out: Path, *, engines: Engines | None, command: str = ""
) -> None:
    """Write ``index.html``, charts, ``doctor.json`` and ``measurements.csv``; ``out`` exists.

    Args:
        diagnosis: of ``folder``.
        folder: of the model.
        out: of the report.
        engines: to compare with; None: none.
        command: that made it.

    Raises:
        OutputError: if a file cannot be written.
    """
    facts = diagnosis.to_json() | ({} if engines is None else engines.to_json())
    page = diagnosis_page(diagnosis, folder, engines=engines, command=command)
    write_files(out, page, {"doctor.json": facts})


def _values(diagnosis: Diagnosis, name: str) -> Iterator[MeasuredValue]:
    """Time and memory of a layer by tokens, a row each."""
    for cost in diagnosis.costs:
        by_method = {
            "transformers": (cost.seconds, cost.bytes),
            "posenc": (cost.accelerated_seconds, cost.accelerated_bytes),
        }
        for method, (seconds, size) in by_method.items():
            for metric, value in (("layer_seconds", seconds), ("layer_bytes", size)):
                if value is not None and cost.measured:
                    yield MeasuredValue(
                        model=name, method=method, metric=metric, length=cost.length, value=value
                    )


def diagnosis_page(
    diagnosis: Diagnosis, folder: Path, *, engines: Engines | None, command: str
) -> Page:
    """The page with its charts."""
    opened, run = opening(diagnosis, folder, engines), diagnosis.reading.by == "run"
    asked = engines or NOT_ASKED
    lines, engine_lines = list(_lines(diagnosis, folder)), list(_engine_lines(asked))
    names = [row.name for row in opened.verdicts.rows]
    roles = dict.fromkeys([*names, *(name for name, _ in lines)], "candidate")
    roles |= dict.fromkeys([*asked.words(), *(name for name, _ in engine_lines)], "baseline")
    styles = looks(roles | COSTS)
    drawing = Drawing(list(styles), styles, "rotation")
    shown = [_turns(drawing, [*lines, *engine_lines], diagnosis)] if lines else []
    return Page(
        facts=(
            f"posenc doctor · {folder.resolve().name} · {diagnosis.model_type or 'unknown'}",
            "read by running its code" if run else "read from its config",
        ),
        opening=opened,
        charts=[*shown, *_cost_charts(drawing, diagnosis.costs, first=not shown)],
        looks=styles,
        sections=[
            *tables(diagnosis, engines),
            *(
                TextSection(key=f"lines-{place}", title=name, code=code)
                for place, (name, code) in enumerate(lines_to_write(diagnosis, engines).items())
            ),
        ],
        values=tuple(_values(diagnosis, folder.name)),
        command=command,
        settings={"model": diagnosis.model_type, "kernels of posenc": diagnosis.kernels},
        note="Beside this page: every chart as PNG and SVG, doctor.json, measurements.csv.",
    )


def _lines(diagnosis: Diagnosis, folder: Path) -> Iterator[Line]:
    """Frequencies of the layers, and of the advised method."""
    reading, advice = diagnosis.reading, diagnosis.advice
    for title, layers in zip(short_titles(reading), reading.layers, strict=True):
        rotation = layers.attention.rotation
        if isinstance(rotation, RotationFacts) and rotation.frequencies:
            yield title, rotation.frequencies
    if not advice.config:
        return
    fields = dict(Fields.read(model_folder(folder, weights=False)).values)
    config = ModelConfig.of(fields)
    changed = {**config.written, **advice.config}
    changed = fields | {config.nested: changed} if config.nested else changed
    goal = int(advice.config["max_position_embeddings"])
    try:
        before = TRANSFORMERS.rotations(config, diagnosis.limits[0].tokens)
        rotations = TRANSFORMERS.rotations(ModelConfig.of(changed), goal)
    except NotServedError:
        return
    for kind, stretched in rotations.items():
        if not stretched.like(before[kind]):
            name = f"{advice.method} × {FACTOR}" + (f", {kind}" if len(rotations) > 1 else "")
            yield name, stretched.frequencies


def _engine_lines(engines: Engines) -> Iterator[Line]:
    """Frequencies of engines that are not those of transformers."""
    for one in engines.served[1:]:
        for kind, rotation in one.rotations.items():
            right = engines.served[0].rotations.get(kind)
            if right is None or not rotation.like(replace(right, gain=rotation.gain)):
                yield f"{one.engine}, {kind}" if kind else one.engine, rotation.frequencies


def _turns(drawing: Drawing, lines: Sequence[Line], diagnosis: Diagnosis) -> Chart:
    """Tokens that each pair turns once in."""
    points = [
        Point(name, pair, Estimate(period, None, 1), f"{period:,.0f} tokens")
        for name, frequencies in lines
        for pair, theta in enumerate(frequencies)
        if theta and (period := 2 * math.pi / abs(theta))
    ]
    level = float(diagnosis.limits[0].tokens) if diagnosis.limits else None
    up = Up(
        title="tokens for a whole turn",
        log=True,
        level=level,
        level_name=f"trained: {level:,.0f} tokens" if level else "",
    )
    guide = (
        "Above the dashed line a pair never turned once in training: angles of longer texts are "
        "new to it."
    )
    return drawing.lines(
        "turns",
        "How slowly each pair turns",
        guide if level else "Fast pairs tell near tokens apart, slow ones far ones.",
        points,
        (Across(title="pair of features"), up),
        first=True,
    )


def _cost_charts(drawing: Drawing, costs: Sequence[LayerCost], *, first: bool) -> Iterator[Chart]:
    """Time and memory of a layer by length; the time is large where it is the first chart."""
    lengths = tuple(cost.length for cost in costs)
    for key, title, unit, names, form in (
        (
            "seconds",
            "Time of a layer",
            "seconds",
            ("seconds", "accelerated_seconds"),
            time_in_words,
        ),
        ("bytes", "Memory of a layer", "bytes", ("bytes", "accelerated_bytes"), size_in_words),
    ):
        points = [
            Point(name, cost.length, Estimate(value, None, 1), form(value))
            for name, field in zip(COSTS, names, strict=True)
            for cost in costs
            if (value := getattr(cost, field))
        ]
        if points:
            axes = Across(title="tokens", lengths=lengths, log=True), Up(title=unit, log=True)
            large = first and key == "seconds"
            yield drawing.lines(key, title, COST_GUIDE, points, axes, first=large)


def _costs(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Length, time and memory in transformers, and both with posenc, in words."""
    return [
        (
            f"{cost.length:,}",
            ("" if cost.measured else "≈ ") + time_in_words(cost.seconds),
            size_in_words(cost.bytes),
            time_in_words(cost.accelerated_seconds),
            size_in_words(cost.accelerated_bytes),
        )
        for cost in diagnosis.costs
    ]


def _table(
    key: str, title: str, guide: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]
) -> TableSection:
    """A table of rows in words."""
    return TableSection(
        key=key,
        title=title,
        guide=guide,
        columns=tuple(
            TableColumn(name=name, text=not place or name in IN_WORDS)
            for place, name in enumerate(columns)
        ),
        rows=tuple(
            (Cell(text=name, kind="name"), *(Cell(text=text) for text in texts))
            for name, *texts in rows
        ),
    )
