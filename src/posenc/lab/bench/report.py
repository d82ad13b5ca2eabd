"""The report of a bench: a page, its charts as pictures, and all numbers as JSON and CSV."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posenc.lab.bench import BenchOptions
from posenc.lab.bench.run import PLAIN, BenchReading, BenchReport, BenchSettings
from posenc.lab.declared import declared_options
from posenc.lab.reporting.charts import Chart
from posenc.lab.reporting.drawing import Across, Drawing, Point, Up, looks
from posenc.lab.reporting.judge import word
from posenc.lab.reporting.measurements import MeasuredValue
from posenc.lab.reporting.numbers import Bounds, Estimate, counted, listed, sentence
from posenc.lab.reporting.opening import (
    UNSURE,
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
from posenc.lab.training.machine import cores

FAST, SLOW = 0.1, 1.0
"""Time beyond that of plain attention, as a share, up to which a pass is fast, and beyond which it
is slow; in between it is slower."""

WORDS = {"holds": "fast", "degrades": "slower", "breaks": "slow", "unsure": "unsure"}
"""Words for a time, by the verdict on its ratio as a deterioration."""

DEFINITIONS = {
    "fast": f"at most {FAST:.0%} slower than plain attention",
    "slower": f"{1 + FAST:.2g} to {1 + SLOW:g} × the time of plain attention",
    "slow": f"more than {1 + SLOW:g} × the time of plain attention",
    "unsure": UNSURE,
    "untestable": "could not be measured",
}

HOW = (
    "Attention alone: each round runs all passes in turn, so that the load of the machine affects "
    "all of them, and each time is divided by that of plain SDPA without positions in the same "
    "round, with the same mask and dtype. Shown are medians over rounds, with 95 % intervals. "
    "Training is the forward and the backward pass."
)

PASSES = {"forward": False, "training": True}
"""Columns, and whether the backward pass is in them."""

MORE = 4
"""Factor of the advised rounds."""

NAME = 20
"""Characters of a name in a headline, at most."""


def write_bench(report: BenchReport, folder: Path, *, command: str = "") -> None:
    """Write ``index.html``, charts, ``bench.json`` and ``measurements.csv``; the folder exists.

    Raises:
        OutputError: if a file cannot be written.
    """
    write_files(folder, bench_page(report, command), {"bench.json": report.to_json()})


def _values(report: BenchReport) -> Iterator[MeasuredValue]:
    """Times, and their multiples of plain attention's, a row each."""
    for reading in report.readings:
        mask = "causal" if reading.causal else "bidirectional"
        facts: dict[str, Any] = {
            "model": reading.encoding,
            "method": f"{reading.contender}, {reading.dtype}, {mask}",
            "length": reading.length,
        }
        times = reading.times
        seconds = {"forward": times.forward_seconds, "training": times.both_seconds}
        for name, both in PASSES.items():
            value, multiple = seconds[name], reading.ratio(both=both)
            if value is not None:
                rounds = times.rounds[both]
                yield MeasuredValue(metric=f"{name}_seconds", value=value, count=rounds, **facts)
            if multiple is not None:
                yield MeasuredValue.of(multiple, metric=f"{name}_ratio", **facts)


def label(reading: BenchReading, settings: BenchSettings) -> str:
    """The encoding, with backend and dtype where there are several."""
    parts = [reading.encoding]
    if len(settings.backends) > 1:
        parts.append(reading.contender.removeprefix("posenc ").replace("posenc", "auto"))
    if len(settings.dtypes or ()) > 1:
        parts.append(reading.dtype)
    return " · ".join(parts)


def opening(report: BenchReport) -> Opening:
    """A word on the time of each, forward and in training, at the longest length, fastest first."""
    rows = [(label(reading, report.settings), reading) for reading in _longest(report)]
    judged = {
        name: tuple(_word(reading.ratio(both=p)) for p in PASSES.values()) for name, reading in rows
    }
    return Opening(
        headline=_headline(rows, judged),
        verdicts=Verdicts(
            title=f"Verdicts at {max(report.settings.lengths or ()):,} tokens",
            columns=tuple(PASSES),
            rows=tuple(
                Verdict(name=name, words=judged[name], why=reading.refusal, note=reading.served_by)
                for name, reading in rows
            ),
            guide=defined(DEFINITIONS, "fast", "slow"),
            meanings=meanings((each for words in judged.values() for each in words), DEFINITIONS),
        ),
        remedies=tuple(_remedies(report, rows, judged)),
    )


Rows = Sequence[tuple[str, BenchReading]]


def _longest(report: BenchReport) -> list[BenchReading]:
    """Readings at the longest length, the fastest in training first, what was refused last."""
    last = max(report.settings.lengths or ())
    readings = [r for r in report.readings if r.length == last and r.contender != PLAIN]
    return sorted(readings, key=lambda r: (r.times.both_ratio is None, r.times.both_ratio or 0.0))


def _word(ratio: Estimate | None) -> str:
    if ratio is None:
        return "untestable"
    change = Estimate(ratio.mean - 1, ratio.half_width, ratio.n)
    return WORDS[word(change, (FAST, SLOW))]


def _headline(rows: Rows, judged: dict[str, tuple[str, ...]]) -> str:
    timed = [
        (shortened(name, NAME), judged[name][1], r.times.both_ratio)
        for name, r in rows
        if r.times.both_ratio is not None
    ]
    of, plain = len(rows), "as fast as plain attention"
    if not timed:
        none = "It could not" if of == 1 else f"None of the {of} could"
        return f"{none} be timed: see why below"
    fast = [name for name, verdict, _ in timed if verdict == "fast"]
    (first, verdict, least), (last, slowest, most) = timed[0], timed[-1]
    if of == 1 and verdict != "unsure":
        if fast:
            return f"{first} trains {plain}, {_times(least)} its time"
        return f"{first} takes {_times(least)} the time of plain attention to train"
    if not fast:
        surely = "surely " if any(word == "unsure" for _, word, _ in timed) else ""
        return f"None {surely}trains {plain}; {first} comes nearest ({_times(least)})"
    ending = f"; {last} takes {_times(most)} its time" if slowest in ("slower", "slow") else ""
    train = "trains" if len(fast) == 1 else "train"
    who = [f"{listed(fast)} {train}", f"{len(fast)} of the {of} {train}"]
    if len(fast) == of:
        who = ["Both train" if of == 2 else f"All {of} train"]
    return fitting(f"{names} {plain}{end}" for names in who for end in (ending, ""))


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 9.95 else f"{ratio:.0f} ×"


def _remedies(
    report: BenchReport, rows: Rows, judged: dict[str, tuple[str, ...]]
) -> Iterator[Remedy]:
    open_ = [(name, reading) for name, reading in rows if "unsure" in judged[name]]
    if open_:
        rounds = MORE * report.settings.rounds
        clause = sentence("open", reason="rounds", labels=[name for name, _ in open_])
        text = sentence("settled", way="more_rounds", clauses=[clause], count=rounds)
        encodings = dict.fromkeys(reading.encoding for _, reading in open_)
        changes = {"encodings": tuple(encodings), "rounds": rounds}
        yield Remedy(text=text, command=_command(report.settings, changes))


def _command(settings: BenchSettings, changes: dict[str, object]) -> str:
    """The command line of a bench with other settings; options of their defaults are left out."""
    usual = {**vars(BenchSettings(device=settings.device)), "threads": cores()}
    words = ["posenc", "bench"]
    for name, (_, option) in declared_options(BenchOptions).items():
        value = changes.get(name, getattr(settings, name))
        if value != usual[name]:
            shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [f"--{option.name.replace('_', '-')}", shown]
    if settings.causal is not None:
        words.append("--causal" if settings.causal else "--bidirectional")
    return shlex.join(words)


def bench_page(report: BenchReport, command: str) -> Page:
    """The page with its charts."""
    settings, about, opened = report.settings, report.about, opening(report)
    names = [row.name for row in opened.verdicts.rows]
    styles = looks(dict.fromkeys(names, "candidate"))
    drawing = Drawing(names, styles, "encoding")
    shape = f"{counted(settings.heads, 'head')} of {settings.head_dim}"
    lengths = ", ".join(f"{length:,}" for length in sorted(set(settings.lengths or ())))
    return Page(
        facts=(
            "posenc bench · attention beside plain SDPA",
            f"{lengths} tokens, {shape}, {', '.join(settings.dtypes or ())}",
            str(about.get("device", "")),
        ),
        opening=opened,
        charts=[_chart(report, drawing, name) for name in ("training", "forward")],
        looks=styles,
        sections=(
            results_table(report),
            TextSection(key="method", title="How this was measured", paragraphs=(HOW,)),
        ),
        values=tuple(_values(report)),
        command=command,
        settings={
            "device": f"{about.get('device', '')}, {counted(settings.threads or 1, 'thread')}",
            "rounds": settings.rounds,
            **about.get("machine", {}),
            "versions": " · ".join(f"{n} {value}" for n, value in about["versions"].items()),
            "made": f"{about.get('date', '')}, in {report.seconds:.0f} s",
        },
        note="Beside this page: every chart as PNG and SVG, bench.json, measurements.csv. Times "
        "are of this machine in this run; only their ratios carry over.",
    )


def _chart(report: BenchReport, drawing: Drawing, name: str) -> Chart:
    """Ratios of a pass: by length, or of each where there is one."""
    settings, both = report.settings, PASSES[name]
    title = "Time in training (forward and backward)" if both else "Time forward"
    guide = "Lower is better; dashed: plain attention, without positions."
    unit = "× the time of plain attention"
    measured = [
        (label(reading, settings), reading, ratio)
        for reading in report.readings
        if reading.contender != PLAIN and (ratio := reading.ratio(both=both)) is not None
    ]
    lengths = tuple(sorted(set(settings.lengths or ())))
    if len(lengths) == 1:
        rows = [
            {
                "subject": n,
                "amount": r.mean,
                "time": f"{r.shown('.2f')} ×",
                "backend": reading.served_by,
            }
            for n, reading, r in measured
        ]
        return drawing.amounts(name, (title, unit), guide, rows, first=both, level=1.0)
    points = [Point(n, reading.length, r, f"{r.shown('.2f')} ×") for n, reading, r in measured]
    across = Across(title="tokens", lengths=lengths, log=True)
    up = Up(title=unit, lower=True, bounds=Bounds(0.0), level=1.0, level_name="plain attention")
    points.sort(key=lambda point: point.x)
    return drawing.lines(name, title, guide, points, (across, up), first=both)


def results_table(report: BenchReport) -> TableSection:
    """All results, a row an encoding."""
    settings, lengths = report.settings, sorted(set(report.settings.lengths or ()))
    readings = {(label(r, settings), r.length): r for r in report.readings if r.contender != PLAIN}
    names = [label(reading, settings) for reading in _longest(report)]

    def cells(name: str) -> Iterator[Cell]:
        last = readings[name, lengths[-1]]
        yield Cell(text=name, small=last.served_by, value=name, kind="name")
        for both in PASSES.values():
            for length in lengths:
                yield Cell.of(readings[name, length].ratio(both=both), ".2f")
        for seconds in (last.times.forward_seconds, last.times.both_seconds):
            yield Cell(text="—" if seconds is None else f"{1e3 * seconds:,.2f}", value=seconds)

    return TableSection(
        key="table",
        title="All results",
        guide="Multiples of the time of plain SDPA in the same round, with 95 % intervals.",
        columns=(
            TableColumn(name="encoding", text=True),
            *(
                TableColumn(name=str(n), group=f"{name} at", short=f"{name} at {n}")
                for name in PASSES
                for n in lengths
            ),
            *(
                TableColumn(name=name, group=f"ms at {lengths[-1]:,}", short=None)
                for name in PASSES
            ),
        ),
        rows=tuple(tuple(cells(name)) for name in names),
        notes=tuple(
            (label(r, settings), f"at {r.length:,}: {r.refusal}.")
            for r in report.readings
            if r.refusal
        ),
    )
