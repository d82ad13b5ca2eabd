"""``posenc doctor``: layers, limits, costs and silent settings of a model, and its engines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from posenc.arguments import Interval, check
from posenc.errors import ArgumentError
from posenc.lab.cli.console import (
    OUT,
    command_line,
    print_json,
    print_line,
    print_report,
    print_study,
    print_tables,
)
from posenc.lab.cli.options import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posenc.lab.evaluation.extend import Extended
    from posenc.transformers.doctor.leaks import Leaks
    from posenc.transformers.doctor.packed import PackedBatch
    from posenc.transformers.engines import Checked
    from posenc.transformers.served import CheckedServer


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
            help="Compare with how an engine would rotate: vllm, sglang, llama.cpp, mlx, "
            "ctranslate2, onnxruntime-genai, openvino or all.",
            show_default="none",
        ),
    ] = None,
    live: Annotated[
        bool, Parameter(help="Load the weights too, and compare its frequencies with its config.")
    ] = False,
    batch: Annotated[
        Path | None,
        Parameter(
            help="With --live: a packed batch, as JSON or safetensors; say if one of its documents "
            "reaches others.",
            show_default="none",
        ),
    ] = None,
    against: Annotated[
        str | None,
        Parameter(
            help="With --live: what a server is started with (its command line, or a file with it; "
            "JSON of engine arguments; config.json, a folder, or GGUF), or its address; say if "
            "it computes the same rotation.",
            show_default="none",
        ),
    ] = None,
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

        posenc doctor llama-folder --seconds 0 --live --batch batch.json

        posenc doctor trained --seconds 0 --live --against "vllm serve trained"
    """
    domain = Annotated[float, Interval(0, remedy="0 measures nothing.")]
    seconds = check("--seconds", domain, seconds)
    from posenc.lab.doctor.report import lines_to_write, opening, tables, write_diagnosis
    from posenc.lab.doctor.words import Engines
    from posenc.lab.folders import output_folder, require_unused
    from posenc.transformers.doctor.diagnosis import diagnose, open_source
    from posenc.transformers.engines import check as check_loaded

    _require_engine(engine)
    _require_live("--batch", batch, live=live)
    _require_live("--against", against, live=live)
    packed = None if batch is None else _packed(batch)
    if out is not None:
        require_unused(out)
    loaded = open_source(model) if live else None
    checked = () if loaded is None else check_loaded(loaded)
    servers = () if against is None else _servers(loaded, against, engine)
    leaks = None if packed is None else _leaks(loaded, packed)
    diagnosis = diagnose(model, budget=seconds)
    engines = None if engine is None else Engines.of(model, engine)
    opened = opening(diagnosis, model, engines)
    if out is not None:
        with output_folder(out) as partial:
            write_diagnosis(diagnosis, model, partial, engines=engines, command=command_line())
    if json:
        engine_values = {} if engines is None else engines.to_json()
        live_values: dict[str, Any] = {"live": [asdict(one) for one in checked]} if live else {}
        live_values |= {} if leaks is None else {"batch": asdict(leaks)}
        if against is not None:
            live_values["against"] = [asdict(one) | {"same": one.same} for one in servers]
        print_json(opened.to_json() | diagnosis.to_json() | engine_values | live_values)
        return
    print_line(f"{diagnosis.model_type or 'unknown'} model", style="bold")
    print_tables(tables(diagnosis, engines))
    for title, lines in lines_to_write(diagnosis, engines).items():
        print_line(f"\n{title}")
        for line in lines.splitlines():
            print_line(line, indent=2)
    if live:
        _print_checked(checked)
    if servers:
        _print_servers(servers)
    if leaks is not None:
        _print_leaks(leaks, batch)
    print_study(opened)
    if out is not None:
        print_report(out / "index.html")


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


def _require_live(option: str, value: object, *, live: bool) -> None:
    """Require --live beside an option that needs the loaded model.

    Raises:
        ArgumentError: without it.
    """
    if value is not None and not live:
        remedy = "It is tried on the loaded model."
        raise ArgumentError(option, expected="--live beside it", got="none", remedy=remedy)


def _packed(path: Path) -> PackedBatch:
    """The batch in a file; raises as ``PackedBatch.read``."""
    from posenc.transformers.doctor.packed import PackedBatch

    return PackedBatch.read(path)


def _servers(
    model: PreTrainedModel | None, against: str, engine: str | None
) -> tuple[CheckedServer, ...]:
    from posenc.lab.doctor.served import is_address, launch_at
    from posenc.lab.doctor.words import ALL
    from posenc.transformers.served import check_served

    assert model is not None
    settings = launch_at(against) if is_address(against) else against
    return check_served(model, settings, engine=None if engine == ALL else engine)


def _print_servers(servers: tuple[CheckedServer, ...]) -> None:
    OUT.print()
    print_line("Against the server:", style="bold")
    for one in servers:
        longest = "" if one.longest is None else f", texts of up to {one.longest:,} tokens"
        if one.same:
            print_line(f"{one.engine}{longest}: computes the same.", indent=2)
        for mismatch in one.mismatches:
            print_line(f"{one.engine}: {mismatch}.", indent=2, style="yellow")
        for name in one.unread:
            print_line(f"{one.engine}: not read: {name}.", indent=2, style="dim")
        if one.remedy:
            _command(one.remedy)


def _leaks(model: PreTrainedModel | None, packed: PackedBatch) -> Leaks:
    """Leaks in the batch, in float32: half precision would hide small ones."""
    from posenc.transformers.doctor.leaks import find_leaks

    assert model is not None
    return find_leaks(model.float(), packed)


def _print_leaks(leaks: Leaks, path: Path | None) -> None:
    from posenc.lab.reporting.numbers import counted

    OUT.print()
    documents = counted(len(leaks.lengths), "document")
    tokens = f"{min(leaks.lengths):,} to {max(leaks.lengths):,} tokens"
    print_line(
        f"{path}: {documents} of {tokens}, number {leaks.changed + 1} changed:", style="bold"
    )
    for one in leaks.modes:
        message = "no other document moves"
        if one.documents:
            moved = counted(len(one.documents), "other document")
            by = f"by up to {one.largest:.2g} of an output's size"
            message = f"{moved} moved, {by}; what stops it: {one.remedy}"
        print_line(f"{one.mode}: {message}.", indent=2, style="yellow" if one.documents else "")


def _require_engine(engine: str | None) -> None:
    """Require ``all`` or the name of an engine.

    Raises:
        UnknownNameError: for another.
    """
    from posenc.lab.doctor.words import ALL
    from posenc.transformers.engines import engine_named

    if engine not in (None, ALL):
        engine_named(engine, also=(ALL,))


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
