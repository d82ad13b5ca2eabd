"""``posenc bench``: speed and memory of attention with encodings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from posenc.cli.completion import complete_encodings
from posenc.cli.console import OUT, Display, Words, new_table, print_json
from posenc.cli.options import ComputeDevice, Json, Quiet, names, numbers, option

if TYPE_CHECKING:
    from posenc.bench.results import Reading, Report, Verdict
    from posenc.bench.run import Step


def bench(
    what: Annotated[
        str | None, option("Of calls, rows, layers, decoding, memory.", "calls and layers")
    ] = None,
    encodings: Annotated[
        str | None,
        option(
            "Encodings: t5,t5@frozen,rope+alibi.", "all with limits", complete=complete_encodings
        ),
    ] = None,
    lengths: Annotated[
        str | None, option("Sequence lengths, comma-separated.", "512 and 2048")
    ] = None,
    backends: Annotated[str, option("Backends of posenc, comma-separated.")] = "auto",
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional", show_default="both at 2048", help="Only one kind of mask."
        ),
    ] = None,
    heads: Annotated[int, option("Attention heads.")] = 8,
    head_dim: Annotated[int, option("Width of a head.")] = 64,
    rounds: Annotated[
        int | None, option("Timing rounds up to 2048 tokens.", "7, or 3 if quick")
    ] = None,
    threads: Annotated[int | None, option("CPU threads.", "one per core")] = None,
    device: ComputeDevice = "cpu",
    dtype: Annotated[
        str | None, option("Dtypes of q, k, v, comma-separated.", "float32; bfloat16 on CUDA")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only posenc and plain SDPA, no memory; at 2048 unless full."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every case with a limit: hours on two cores.")
    ] = False,
    out: Annotated[Path, option("Folder for JSON and charts.")] = Path("posenc-bench"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time attention with encodings against plain SDPA and other implementations.

    Measured by default is every encoding with a limit, in about ten minutes on two cores. --full
    measures every case with a limit: 512 to 4096 tokens, both masks, float32 and bfloat16, many
    short sequences, generation with a cache, and memory at 16,384; --lengths, --dtype, --what and
    --encodings narrow it. Times are medians of ratios to plain SDPA with the same mask and dtype in
    the same round. Memory is the peak beyond the inputs (on the CPU of a separate process).

    Examples:

        posenc bench

        posenc bench --quick

        posenc bench --full

        posenc bench --what decoding,rows

        posenc bench --encodings t5 --lengths 1024,4096 --backends auto,blockwise

        posenc bench --device cuda
    """
    import torch

    from posenc.bench.files import write_results
    from posenc.bench.run import bench as run_benchmark
    from posenc.bench.settings import Settings
    from posenc.training.machine import cores

    settings = Settings(
        what=names(what),  # type: ignore[arg-type]
        encodings=names(encodings),
        lengths=numbers("--lengths", lengths),
        backends=names(backends) or (),
        causal=causal,
        heads=heads,
        head_dim=head_dim,
        rounds=rounds,
        threads=cores() if threads is None else threads,
        device=device,
        dtypes=names(dtype),  # type: ignore[arg-type]
        quick=quick,
        full=full,
    )
    torch.set_num_threads(settings.counts[1])
    with BenchDisplay(shown=not quiet and not json) as display:
        report = run_benchmark(settings, progress=display)
    files = write_results(report, out)
    if json:
        print_json(report.to_json())
        return
    _print_limits(report)
    _print_readings(report)
    _print_refusals(report)
    OUT.print(Text(f"\n{_about(report)}", "dim"))
    for path in (files.json, *files.pictures):
        OUT.print(f"Written: {path}", soft_wrap=True)


class BenchDisplay(Display):
    """A bar on a terminal, elsewhere a line for each step."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            Words("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            Words("{task.description}"),
            shown=shown,
        )
        self.task = self.bars.add_task("", total=1.0)

    def __call__(self, step: Step) -> None:
        if self.live:
            self.bars.update(self.task, completed=step.share, description=step.title)
        else:
            self.say(f"[{step.share:4.0%}] {step.title}")


def _case(case: Verdict | Reading) -> str:
    rows = "" if case.batch == 1 else f"{case.batch} × {case.heads} × "
    causal = " causal" if case.causal else ""
    dtype = "" if case.dtype == "float32" else " " + case.dtype.replace("float", "f")
    return f"{case.encoding}, {rows}{case.length}{causal}{dtype}"


PAIRS: dict[tuple[str, ...], str] = {
    ("forward", "both"): "Multiples of plain SDPA's time, forward/both passes",
    ("forward memory", "both memory"): "Megabytes beyond plain SDPA's, forward/both",
    ("of rope", "of transformers"): "A token with a cache, in multiples of rope's/transformers'",
    ("beats flex", "fits"): "FlexAttention's time in multiples of posenc's/whether it fits",
}
"""Quantities that share a cell, and the title of their table."""

WIDE = 8192
"""Tokens beyond which cases have a table of their own, so that lines stay short."""


def _print_limits(report: Report) -> None:
    """Print tables of values and limits by length."""
    tables: dict[tuple[tuple[str, ...], str, int, int, bool], list[Verdict]] = {}
    for verdict in report.verdicts:
        pair = next(pair for pair in PAIRS if verdict.quantity in pair)
        key = (pair, verdict.dtype, verdict.batch, verdict.heads, verdict.length > WIDE)
        tables.setdefault(key, []).append(verdict)
    for (pair, dtype, batch, heads, _), verdicts in tables.items():
        rows = "" if batch == 1 else f", {batch} × {heads} heads"
        OUT.print(Text(f"\n{PAIRS[pair]}; {dtype}{rows}", "bold"))
        OUT.print(_limit_table(verdicts, pair))
    if tables:
        measured = [verdict for verdict in report.verdicts if verdict.value is not None]
        met = sum(verdict.met for verdict in measured)
        left = len(report.verdicts) - len(measured)
        more = f"; {left} not measured." if left else "."
        OUT.print(f"\n{met} of {len(measured)} limits met; * marks the others{more}")


def _limit_table(verdicts: Sequence[Verdict], pair: tuple[str, ...]) -> Table:
    """A line for each group with its limits, then one for each encoding and mask."""
    lengths = sorted({verdict.length for verdict in verdicts})
    table = new_table("tokens", *map(str, lengths), gap=1)
    groups: dict[str, dict[str, dict[tuple[int, str], Verdict]]] = {}
    for verdict in verdicts:
        label = verdict.encoding + (", causal" if verdict.causal else "")
        cases = groups.setdefault(verdict.row, {})
        cases.setdefault(label, {})[verdict.length, verdict.quantity] = verdict
    for row, cases in groups.items():
        every = {key: verdict for found in cases.values() for key, verdict in found.items()}
        table.add_row(Text(row, "bold"), *(_cell(every, n, pair, bounds=True) for n in lengths))
        for label, found in cases.items():
            table.add_row(f"  {label}", *(_cell(found, n, pair, bounds=False) for n in lengths))
    return table


def _cell(
    found: Mapping[tuple[int, str], Verdict], length: int, pair: tuple[str, ...], *, bounds: bool
) -> Text:
    """The values of a pair of quantities, or their limits."""
    verdicts = [found[length, name] for name in pair if (length, name) in found]
    if not verdicts:
        return Text()
    if bounds:
        sign = "≥" if verdicts[0].at_least else "≤"
        return Text(f"{sign} " + "/".join(_show(v, v.bound) for v in verdicts), "dim")
    parts = []
    for verdict in verdicts:
        missed = verdict.value is not None and not verdict.met
        text = "–" if verdict.value is None else _show(verdict, verdict.value) + "*" * missed
        parts.append(Text(text, "bold red" if missed else ""))
    return Text("/").join(parts)


def _show(verdict: Verdict, value: float) -> str:
    if "memory" in verdict.quantity:
        return f"{value / 1e6:.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _print_readings(report: Report) -> None:
    """Print timings of posenc and other implementations, if not among the limits."""
    from posenc.bench.contenders import PLAIN

    titles = {
        "call": "Attention calls: multiples of plain SDPA with the same mask",
        "layer": "Layers with projections: multiples of the same layer without positions",
        "token": "Generation with a cache: multiples of the time of a token with rope",
    }
    compared = {_case(r) for r in report.readings if r.contender not in (PLAIN, "posenc")}
    judged = {_case(verdict) for verdict in report.verdicts} - compared
    for level, title in titles.items():
        timed = [
            r
            for r in report.readings
            if r.level == level and r.forward_ratio is not None and _case(r) not in judged
        ]
        if not timed:
            continue
        OUT.print(Text(f"\n{title}", "bold"))
        errors = ("error", "gradients'") if level == "call" else ()
        table = new_table("tokens", "forward", "fwd + bwd", "memory", *errors, gap=1)
        case = ""
        for reading in timed:
            if _case(reading) != case:
                case = _case(reading)
                table.add_row(Text(case, "bold"))
            served = f" ({reading.served_by})" if reading.served_by else ""
            table.add_row(
                f"  {reading.contender}{served}",
                _number(reading.forward_ratio, "{:.2f}".format),
                _number(reading.both_ratio, "{:.2f}".format),
                _number(reading.both_memory, lambda value: f"{value / 1e6:.0f} MB"),
                *([_number(reading.output_error, "{:.0e}".format)] if errors else []),
                *([_number(reading.gradient_error, "{:.0e}".format)] if errors else []),
            )
        OUT.print(table)


def _number(value: float | None, show: Callable[[float], str]) -> str:
    return "–" if value is None else show(value)


def _print_refusals(report: Report) -> None:
    """Print the cases not measured, with the reason."""
    if report.refusals:
        OUT.print()
    for contender, reasons in report.refusals.items():
        for reason, encodings in reasons.items():
            OUT.print(Text(f"{contender}, for {', '.join(encodings)}: {reason}.", "dim"))


def _about(report: Report) -> str:
    settings, machine = report.settings, report.machine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f"{report.device}; {machine['threads']} threads; {settings['heads']} heads of "
        f"{settings['head_dim']}, {', '.join(settings['dtypes'])}; {settings['rounds']} rounds; "
        f"{versions}. {report.seconds / 60:.1f} minutes."
    )
