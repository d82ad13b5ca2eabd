"""``posenc doctor``: encodings, limits, costs and silent settings of a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from posenc.cli.console import OUT, new_table, print_json
from posenc.cli.options import Json

if TYPE_CHECKING:
    from posenc.evaluation.doctor import Diagnosis


def doctor(
    model: Annotated[Path, typer.Argument(help="Folder with config.json; weights are not read.")],
    seconds: Annotated[
        float, typer.Option(help="Seconds to measure a layer for; 0 measures nothing.", min=0)
    ] = 60.0,
    json: Json = False,
) -> None:
    """Diagnose a transformers model: encodings, the lengths they hold, costs, ignored settings.

    Examples:

        posenc doctor deberta-folder

        posenc doctor llama-folder --seconds 0 --json
    """
    from posenc.evaluation.doctor import diagnose

    diagnosis = diagnose(model, budget=seconds)
    if json:
        print_json(diagnosis.to_json())
    else:
        _print(diagnosis)


def _print(diagnosis: Diagnosis) -> None:
    _line(f"{diagnosis.model_type or 'unknown'} model", style="bold")
    for place in diagnosis.positions:
        limit = f"from {place.breaks_at:,} tokens on" if place.breaks_at else "no length known"
        _line(f"{place.layers}: {place.described}", indent=2)
        _line(f"breaks: {limit}; {place.why}", indent=4)
        methods = diagnosis.extensions.get(place.encoding, ())
        if methods:
            _line(f"extended by: {', '.join(methods)}", indent=4)
    if not any(diagnosis.extensions.values()):
        _line("posenc extend does not take this model.", indent=2)
    if not diagnosis.positions:
        _line("The config does not tell how positions enter this model.", indent=2)
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


def _line(text: str, *, indent: int = 0, style: str = "") -> None:
    OUT.print(Padding(Text(text, style=style), (0, 0, 0, indent)))


def _print_costs(diagnosis: Diagnosis) -> None:
    table = new_table("tokens", "transformers", "", "with posenc", "")
    for cost in diagnosis.costs:
        sign = "" if cost.measured else "≈ "
        table.add_row(
            f"{cost.length:,}",
            sign + _time(cost.seconds),
            _memory(cost.bytes),
            _time(cost.accelerated_seconds),
            _memory(cost.accelerated_bytes),
        )
    _line("One layer, forward, one row, this machine (≈ computed from shorter inputs):")
    OUT.print(table)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _memory(size: float | None) -> str:
    if size is None:
        return "–"
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
