"""Engines on a terminal: how each would rotate, and what to type for one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posenc.lab.cli.console import OUT, new_table, print_line

if TYPE_CHECKING:
    from posenc.lab.doctor.engines import Engines
    from posenc.lab.evaluation.extend import Extended
    from posenc.transformers.doctor.facts import LayerReading


def require_engine(engine: str | None) -> None:
    """Require ``all`` or the name of an engine.

    Raises:
        UnknownNameError: for another.
    """
    from posenc.lab.doctor.engines import ALL
    from posenc.transformers.engines.comparison import engine_named

    if engine not in (None, ALL):
        engine_named(engine, also=(ALL,))


def print_engines(engines: Engines, reading: LayerReading) -> None:
    """The rotations of a config in engines, and the lines that are right in all."""
    from posenc.lab.reporting.sentences import sentence

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
