"""Engines on a terminal: how each would rotate, and what to type for one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from posenc.cli.console import OUT, new_table

if TYPE_CHECKING:
    from posenc.evaluation.doctor.facts import Reading
    from posenc.evaluation.engines import Remedy, Rotation, Served
    from posenc.evaluation.extend import Extended

ALL = "all"


def require_engine(engine: str | None) -> None:
    """Require ``all`` or the name of an engine.

    Raises:
        ArgumentError: for another.
    """
    from posenc.evaluation.engines.comparison import engine_named

    if engine not in (None, ALL):
        engine_named(engine)


def print_served(model: Path, engine: str, reading: Reading) -> None:
    """The rotations of a model's config in engines, and the lines that are right in all."""
    from posenc.evaluation.engines.truth import unlike_rules

    served, remedy = _served(model, engine)
    OUT.print()
    if not served:
        _line("Engines: not compared, the config states no rotation.")
        return
    _line(f"By the rules of the engines, as read in {served[0].read}:", style="bold")
    table = new_table("engine", "slowest pair", "gain", "longest text")
    for one in served:
        longest = "no limit" if one.longest is None else f"{one.longest:,}"
        if not one.rotations:
            table.add_row(one.engine, "—", "—", "—")
        elif one is not served[0] and not one.difference:
            table.add_row(one.engine, "as transformers", "", longest)
            continue
        for kind, rotation in one.rotations.items():
            name = f"{one.engine}, {kind}" if kind else one.engine
            table.add_row(name, _period(rotation), f"{rotation.gain:.5g}", longest)
    OUT.print(Padding(table, (0, 0, 0, 2)))
    numbers = unlike_rules(served[0], reading)
    if numbers:
        _line(
            f"{len(numbers)} layers of this model rotate otherwise than transformers' rules say, "
            "when its code is run: for them nothing is compared.",
            style="yellow",
        )
    _print_differences(served)
    if remedy is not None:
        _print_remedy(remedy)
    elif any(one.difference for one in served):
        _line("No line of config.json makes more engines rotate as transformers does.")


def served_json(model: Path, engine: str) -> dict[str, Any]:
    """The same as JSON values."""
    served, remedy = _served(model, engine)
    return {
        "engines": [asdict(one) for one in served],
        "right_in_all": None if remedy is None else asdict(remedy),
    }


def print_serving(extended: Extended) -> None:
    """Print the commands and settings of the engine that was asked for."""
    if extended.left_out:
        OUT.print()
    for spec, why in extended.left_out.items():
        _line(f"Left out: {spec} {why}.", style="dim")
    serving = extended.serving
    if serving is None:
        return
    OUT.print(Text(f"\nFor {serving.engine}:"))
    _command(serving.command)
    if serving.original:
        _line("or, from the folder of the model as it was:")
        _command(serving.original)
    if serving.keys:
        _line("or, in a GGUF file of the model as it was:")
        for key, (value, kind) in serving.keys.items():
            shown = f"{value:.10g}" if isinstance(value, float) else value
            _line(f"{key} = {shown} ({kind})", indent=2)


def engine_json(extended: Extended) -> dict[str, Any]:
    """The same as JSON values; empty if no engine was asked for."""
    if extended.serving is None:
        return {}
    return {"serving": asdict(extended.serving), "left_out": extended.left_out}


def _served(model: Path, engine: str) -> tuple[tuple[Served, ...], Remedy | None]:
    from posenc.evaluation.engines import compare, right_in_all
    from posenc.evaluation.engines.comparison import engine_named
    from posenc.evaluation.engines.transformers import TRANSFORMERS
    from posenc.evaluation.hub import model_folder
    from posenc.integrations.transformers.checkpoints.fields import Fields

    fields = Fields.read(model_folder(model, weights=False)).values
    served = compare(fields)
    if engine != ALL:
        names = {TRANSFORMERS.name, engine_named(engine).name}
        served = tuple(one for one in served if one.engine in names)
    differ = any(one.difference for one in served)
    return served, right_in_all(fields) if differ else None


def _print_differences(served: tuple[Served, ...]) -> None:
    from posenc.reporting.sentences import listed

    alike = [one.engine for one in served[1:] if not one.difference]
    if alike:
        _line(f"{listed(alike)} rotate{'s' * (len(alike) == 1)} as transformers does.")
    for one in served[1:]:
        if one.difference:
            effect = f": {one.effect}" if one.effect else ""
            _line(f"{one.engine} {one.difference}{effect}.", style="yellow")
    stated = served[0].longest
    for one in served[1:]:
        if one.longest is not None and stated is not None and one.longest != stated:
            _line(
                f"{one.engine} takes texts of up to {one.longest:,} tokens unless it is told "
                f"otherwise; the config states {stated:,}.",
                style="yellow",
            )


def _print_remedy(remedy: Remedy) -> None:
    where = f"{remedy.nested} of config.json" if remedy.nested else "config.json"
    left = "; ".join(f"{engine} still {why}" for engine, why in remedy.left.items())
    _line(f"Right in {'more engines' if left else 'all'}, in {where}:")
    for line in json.dumps(remedy.changes, indent=2).splitlines()[1:-1]:
        _line(line, indent=2)
    if left:
        _line(f"{left}.")


def _period(rotation: Rotation) -> str:
    """Tokens in which the slowest pair turns once."""
    slowest = min((theta for theta in rotation.frequencies if theta), default=0.0)
    return f"{2 * math.pi / slowest:,.0f} tokens" if slowest else "at rest"


def _command(text: str) -> None:
    OUT.print(Padding(Text(text, style="bold"), (0, 0, 0, 2)), soft_wrap=True)


def _line(text: str, *, indent: int = 0, style: str = "") -> None:
    OUT.print(Padding(Text(text, style=style), (0, 0, 0, indent)))
