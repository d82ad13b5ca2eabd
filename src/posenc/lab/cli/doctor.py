"""``posenc doctor``: layers, limits, costs and silent settings of a model, and its engines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posenc.arguments import Interval, check
from posenc.lab.cli.console import (
    OUT,
    command_line,
    new_table,
    print_json,
    print_line,
    print_opening,
    print_report,
)
from posenc.lab.cli.options import Json

if TYPE_CHECKING:
    from posenc.lab.doctor.words import Engines
    from posenc.lab.evaluation.extend import Extended
    from posenc.transformers.doctor.diagnosis import Diagnosis
    from posenc.transformers.doctor.facts import LayerReading
    from posenc.transformers.engines import Checked


def doctor(
    model: Annotated[
        Path,
        Parameter(
            help="Folder with config.json, or org/name@revision of the hub; weights are not read."
        ),
    ],
    /,
    *,
    seconds: Annotated[
        float, Parameter(help="Seconds to measure a layer for; 0 measures nothing.")
    ] = 60.0,
    engine: Annotated[
        str | None,
        Parameter(
            help="Compare with how an engine would rotate: vllm, sglang, llama.cpp, mlx or all.",
            show_default="none",
        ),
    ] = None,
    live: Annotated[
        bool, Parameter(help="Load the weights too, and compare its frequencies with its config.")
    ] = False,
    out: Annotated[
        Path | None, Parameter(help="Output folder for a report.", show_default="none")
    ] = None,
    json: Json = False,
) -> None:
    """Diagnose a transformers model: layers, the lengths they hold, costs, ignored settings.

    The model's code is run without its weights, in a process of its own, and each layer is
    described as it computed. Where it cannot be run, the config is read instead.

    Examples:

        posenc doctor deberta-folder

        posenc doctor llama-folder --seconds 0 --json

        posenc doctor llama-folder --engine all --out report

        posenc doctor Qwen/Qwen3-8B@main --seconds 0 --live
    """
    domain = Annotated[float, Interval(0, remedy="0 measures nothing.")]
    seconds = check("--seconds", domain, seconds)
    from posenc.lab.doctor.report import opening, write_diagnosis
    from posenc.lab.doctor.words import Engines
    from posenc.lab.folders import output_folder, require_unused
    from posenc.transformers.doctor.diagnosis import check_source, diagnose

    _require_engine(engine)
    if out is not None:
        require_unused(out)
    checked = check_source(model) if live else ()
    diagnosis = diagnose(model, budget=seconds)
    engines = None if engine is None else Engines.of(model, engine)
    opened = opening(diagnosis, model, engines)
    if out is not None:
        with output_folder(out) as partial:
            write_diagnosis(diagnosis, model, partial, engines=engines, command=command_line())
    if json:
        engine_values = {} if engines is None else engines.to_json()
        loaded = {"live": [asdict(one) for one in checked]} if live else {}
        print_json(opened.to_json() | diagnosis.to_json() | engine_values | loaded)
        return
    _print(diagnosis)
    if engines is not None:
        _print_engines(engines, diagnosis.reading)
    if live:
        _print_checked(checked)
    print_opening(opened)
    if out is not None:
        print_report(out / "index.html")


def _print(diagnosis: Diagnosis) -> None:
    from posenc.lab.doctor.report import cost_rows, length_sentences, setting_sentences
    from posenc.lab.doctor.words import descriptions, titles
    from posenc.transformers.doctor.advice import config_lines

    reading = diagnosis.reading
    by = "read by running its code" if reading.by == "run" else "not run, read from its config"
    print_line(f"{diagnosis.model_type or 'unknown'} model, {by}", style="bold")
    if reading.reason:
        print_line(f"{reading.reason.rstrip('.')}.", indent=2, style="yellow")
    for title, lines in zip(titles(reading), descriptions(reading), strict=True):
        print_line(title, indent=2)
        for line in lines:
            print_line(line, indent=4)
    for table in reading.tables:
        print_line(f"{table.module}: a table of {table.rows:,} positions", indent=2)
    OUT.print()
    for text in length_sentences(diagnosis):
        print_line(text)
    lines = config_lines(diagnosis.advice)
    if lines:
        print_line("in config.json, for transformers:", indent=2)
        for line in lines:
            print_line(line, indent=2)
    OUT.print()
    for problem, change in setting_sentences(diagnosis):
        print_line(problem, style="yellow" if change else "")
        if change:
            print_line(change, indent=2)
    OUT.print()
    if diagnosis.costs:
        costs = new_table("tokens", "transformers", "", "with posenc", "")
        for row in cost_rows(diagnosis):
            costs.add_row(*row)
        print_line("One layer, forward, one row, this machine (≈ computed from shorter inputs):")
        OUT.print(costs)
        print_line(f"posenc's CPU kernels: {diagnosis.kernels}.")
        OUT.print()
    print_line(diagnosis.acceleration)


def _print_checked(checked: tuple[Checked, ...]) -> None:
    from posenc.lab.reporting.numbers import counted
    from posenc.transformers.engines.rotation import differing_pairs

    OUT.print()
    print_line("Loaded with its weights:", style="bold")
    for one in checked:
        first = checked[0]
        unlike = differing_pairs(one.own.frequencies, first.own.frequencies)
        unlike = unlike and f", {unlike} unlike those of {first.layer_type or first.path}"
        layers = f" of layers of {one.layer_type}" if one.layer_type else ""
        pairs = counted(sum(theta > 0 for theta in one.own.frequencies), "pair")
        message = one.problem or (
            "as its config says" if one.stated else "which its config does not state"
        )
        print_line(
            f"{one.path}{layers}: {pairs}{unlike}, gain {one.own.gain:.5g}, {message}.",
            indent=2,
            style="yellow" if one.problem else "",
        )
    if not checked:
        print_line("No rotary frequencies were found.", indent=2)


def _require_engine(engine: str | None) -> None:
    """Require ``all`` or the name of an engine.

    Raises:
        UnknownNameError: for another.
    """
    from posenc.lab.doctor.words import ALL
    from posenc.transformers.engines import engine_named

    if engine not in (None, ALL):
        engine_named(engine, also=(ALL,))


def _print_engines(engines: Engines, reading: LayerReading) -> None:
    """The rotations of a config in engines, and the lines that are right in all."""
    from posenc.lab.reporting.numbers import sentence

    OUT.print()
    if engines.served:
        print_line(
            f"By the rules of the engines, as read in {engines.served[0].read}:", style="bold"
        )
        OUT.print(Padding(engine_table(engines), (0, 0, 0, 2)))
    for text in engines.sentences(reading):
        print_line(text)
    if engines.remedy is not None:
        print_line(sentence("right_in", remedy=engines.remedy))
        for line in json.dumps(engines.remedy.changes, indent=2).splitlines()[1:-1]:
            print_line(line, indent=2)
        if engines.remedy.left:
            print_line(sentence("still_left", remedy=engines.remedy))


def engine_table(engines: Engines) -> Table:
    """A row for each rotation; names are wrapped where the terminal is narrow."""
    columns, rows = engines.table()
    table = new_table(*columns, wrapped=(columns[0], columns[-1]))
    for row in rows:
        table.add_row(*row)
    return table


def print_serving(extended: Extended) -> None:
    """Print the commands and settings of the engines that were asked for."""
    if extended.left_out:
        OUT.print()
    for spec, why in extended.left_out.items():
        print_line(f"Left out: {spec} {why}.", style="dim")
    for serving in extended.serving:
        OUT.print(Text(f"\nFor {serving.engine}:"))
        _command(serving.command)
        if serving.original:
            print_line("or, from the folder of the model as it was:")
            _command(serving.original)
        if serving.keys:
            print_line("or, in a GGUF file of the model as it was:")
            for key, (value, kind) in serving.keys.items():
                shown = f"{value:.10g}" if isinstance(value, float) else value
                print_line(f"{key} = {shown} ({kind})", indent=2)


def engine_json(extended: Extended) -> dict[str, Any]:
    """Commands and keys of each engine as JSON values; empty without engines."""
    if not extended.serving:
        return {}
    serving = [asdict(one) for one in extended.serving]
    return {"serving": serving, "left_out": extended.left_out}


def _command(text: str) -> None:
    """Print a command in one line, whatever the width of the terminal."""
    OUT.print(Text(f"  {text}", style="bold"), soft_wrap=True)
