"""``posenc doctor``: layers, limits, costs and silent settings of a transformers model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from posenc.cli.console import OUT, new_table, print_json
from posenc.cli.engines import print_served, require_engine, served_json
from posenc.cli.options import Json

if TYPE_CHECKING:
    from posenc.evaluation.doctor.diagnosis import Diagnosis
    from posenc.evaluation.engines import Checked


def doctor(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder with config.json, or org/name@revision of the hub; weights are not read."
        ),
    ],
    seconds: Annotated[
        float, typer.Option(help="Seconds to measure a layer for; 0 measures nothing.", min=0)
    ] = 60.0,
    engine: Annotated[
        str | None,
        typer.Option(
            show_default="none",
            help="Compare with how an engine would rotate: vllm, sglang, llama.cpp, mlx or all.",
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Load the weights too, and compare its frequencies with its config."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Diagnose a transformers model: layers, the lengths they hold, costs, ignored settings.

    The model's code is run without its weights, in a process of its own, and each layer is told as
    it computed. Where it cannot be run, the config is read instead.

    Examples:

        posenc doctor deberta-folder

        posenc doctor llama-folder --seconds 0 --json

        posenc doctor llama-folder --seconds 0 --engine all

        posenc doctor Qwen/Qwen3-8B@main --seconds 0 --live
    """
    from posenc.evaluation.doctor.diagnosis import diagnose
    from posenc.evaluation.doctor.loading import check_source

    require_engine(engine)
    diagnosis = diagnose(model, budget=seconds)
    checked = check_source(model) if live else ()
    if json:
        served = {} if engine is None else served_json(model, engine)
        loaded = {"live": [asdict(one) for one in checked]} if live else {}
        print_json(diagnosis.to_json() | served | loaded)
        return
    _print(diagnosis)
    if engine is not None:
        print_served(model, engine, diagnosis.reading)
    if live:
        _print_checked(checked)


def _print(diagnosis: Diagnosis) -> None:
    from posenc.evaluation.doctor.words import described, numbers_in_words

    reading = diagnosis.reading
    by = "read by running its code" if reading.by == "run" else "not run, read from its config"
    _line(f"{diagnosis.model_type or 'unknown'} model, {by}", style="bold")
    if reading.reason:
        _line(f"{reading.reason.rstrip('.')}.", indent=2, style="yellow")
    stacks = {layers.attention.module.partition(".*")[0] for layers in reading.layers}
    for layers in reading.layers:
        count, numbers = len(layers.numbers), numbers_in_words(layers.numbers)
        title = f"{count or 1} layer{'s' * (count > 1)}" + (f": {numbers}" if numbers else "")
        if len(reading.layers) == 1:
            title = f"all {count} layers" if count > 1 else "the layer"
        if len(stacks) > 1:
            title += f" of {layers.attention.module.partition('.*')[0]}"
        _line(title, indent=2)
        for line in described(layers.attention):
            _line(line, indent=4)
    for table in reading.tables:
        _line(f"{table.module}: a table of {table.rows:,} positions", indent=2)
    if not reading.layers:
        _line("The config does not tell how positions enter this model.", indent=2)
    OUT.print()
    _print_length(diagnosis)
    OUT.print()
    for finding in diagnosis.findings:
        _line(f"{finding.field} {finding.problem}.", style="yellow")
        _line(f"Write {finding.change}.", indent=2)
    if not diagnosis.findings:
        _line("No setting without effect was found.")
    OUT.print()
    if diagnosis.costs:
        _print_costs(diagnosis)
        OUT.print()
    _line(diagnosis.acceleration)


def _print_checked(checked: tuple[Checked, ...]) -> None:
    from posenc.reporting.numbers import counted

    OUT.print()
    _line("Loaded with its weights:", style="bold")
    for one in checked:
        layers = f" of layers of {one.layer_type}" if one.layer_type else ""
        pairs = counted(sum(theta > 0 for theta in one.own.frequencies), "pair")
        told = one.problem or (
            "as its config says" if one.stated else "which its config does not state"
        )
        _line(
            f"{one.path}{layers}: {pairs}, gain {one.own.gain:.5g}, {told}.",
            indent=2,
            style="yellow" if one.problem else "",
        )
    if not checked:
        _line("No rotary frequencies were found.", indent=2)


def _print_length(diagnosis: Diagnosis) -> None:
    from posenc.evaluation.doctor.advice import config_lines

    for limit in diagnosis.limits:
        _line(f"Breaks beyond {limit.tokens:,} tokens: {limit.why}.")
    advice = diagnosis.advice
    if not advice.method:
        _line(f"Advice: no extension, {advice.why}.")
        return
    _line(f"Advice: {advice.method}, {advice.why}.")
    if advice.command:
        OUT.print(Padding(Text(advice.command, style="bold"), (0, 0, 0, 2)), soft_wrap=True)
    lines = config_lines(advice)
    if lines:
        beside = "or in config.json" if advice.command else "in config.json"
        _line(f"{beside}, for transformers:", indent=2)
        for line in lines:
            _line(line, indent=2)


def _line(text: str, *, indent: int = 0, style: str = "") -> None:
    OUT.print(Padding(Text(text, style=style), (0, 0, 0, indent)))


def _print_costs(diagnosis: Diagnosis) -> None:
    from posenc.reporting.numbers import size_in_words

    table = new_table("tokens", "transformers", "", "with posenc", "")
    for cost in diagnosis.costs:
        sign = "" if cost.measured else "≈ "
        table.add_row(
            f"{cost.length:,}",
            sign + _time(cost.seconds),
            size_in_words(cost.bytes),
            _time(cost.accelerated_seconds),
            size_in_words(cost.accelerated_bytes),
        )
    _line("One layer, forward, one row, this machine (≈ computed from shorter inputs):")
    OUT.print(table)
    _line(f"posenc's CPU kernels: {diagnosis.kernels}.")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"
