"""``posenc bench``: speed and memory of attention with encodings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TimeElapsedColumn
from rich.text import Text

from posenc.cli.completion import complete_encodings
from posenc.cli.console import OUT, Display, Words, new_table, print_json
from posenc.cli.options import ComputeDevice, Json, Quiet, names, numbers, option

if TYPE_CHECKING:
    from posenc.bench.results import Reading, Report, Verdict
    from posenc.bench.run import Step


def bench(
    encodings: Annotated[
        str | None,
        option(
            "Encodings: t5,t5@frozen,rope+alibi.", "all with limits", complete=complete_encodings
        ),
    ] = None,
    lengths: Annotated[
        str | None, option("Sequence lengths, comma-separated.", "those with limits")
    ] = None,
    backends: Annotated[str, option("Backends of posenc, comma-separated.")] = "auto",
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional", show_default="both", help="Only one kind of mask."
        ),
    ] = None,
    heads: Annotated[int, option("Attention heads.")] = 8,
    head_dim: Annotated[int, option("Width of a head.")] = 64,
    rounds: Annotated[
        int | None, option("Timing rounds up to 2048 tokens.", "7, or 3 if quick")
    ] = None,
    threads: Annotated[int | None, option("CPU threads.", "one per core")] = None,
    device: ComputeDevice = "cpu",
    dtype: Annotated[str | None, option("Dtype of q, k, v.", "float32; bfloat16 on CUDA")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only posenc and plain SDPA, up to 4096 tokens.")
    ] = False,
    out: Annotated[Path, option("Folder for JSON and charts.")] = Path("posenc-bench"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time attention with encodings against plain SDPA and other implementations.

    Without --encodings and --lengths, all cases with a limit are measured: ten to fifteen minutes
    on two cores, two with --quick. Times are medians of ratios to plain SDPA with the same mask in
    the same round. Memory is the peak beyond the inputs (on the CPU of a separate process).

    Examples:

        posenc bench

        posenc bench --quick

        posenc bench --encodings t5,kerple --lengths 1024,4096 --backends auto,tiled

        posenc bench --device cuda
    """
    import torch

    from posenc.bench.files import write_results
    from posenc.bench.run import bench as run_benchmark
    from posenc.bench.settings import Settings
    from posenc.training.machine import cores

    settings = Settings(
        encodings=names(encodings),
        lengths=numbers("--lengths", lengths),
        backends=names(backends) or (),
        causal=causal,
        heads=heads,
        head_dim=head_dim,
        rounds=rounds,
        threads=cores() if threads is None else threads,
        device=device,
        dtype=dtype,
        quick=quick,
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
    return f"{case.encoding}, {case.length}{' causal' if case.causal else ''}"


def _print_limits(report: Report) -> None:
    """Print the limits of each case and whether they are met."""
    if not report.verdicts:
        return
    OUT.print(Text("\nLimits: multiples of plain SDPA's time; memory beyond plain SDPA's", "bold"))
    table = new_table("tokens", "forward", "", "", "fwd + bwd", "", "", gap=1)
    rows: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in report.verdicts:
        rows.setdefault(verdict.row, {}).setdefault(_case(verdict), []).append(verdict)
    for row, cases in rows.items():
        table.add_row(Text(row, "bold"))
        for case, verdicts in cases.items():
            ahead = [v for v in verdicts if v.quantity.startswith("forward")]
            rest = [v for v in verdicts if v not in ahead]
            table.add_row(f"  {case}", *_verdict_cells(ahead), *_verdict_cells(rest))
    OUT.print(table)
    measured = [verdict for verdict in report.verdicts if verdict.value is not None]
    met = sum(verdict.met for verdict in measured)
    left = len(report.verdicts) - len(measured)
    OUT.print(f"{met} of {len(measured)} met" + (f"; {left} not measured." if left else "."))


def _verdict_cells(verdicts: Sequence[Verdict]) -> tuple[str, str, Text]:
    """Value, limit and result of a verdict, if there is one."""
    if not verdicts:
        return "", "", Text()
    (verdict,) = verdicts

    def show(value: float) -> str:
        return f"{value / 1e6:.0f} MB" if "memory" in verdict.quantity else f"{value:.2f}"

    limit = f"{'≥' if verdict.at_least else '≤'} {show(verdict.bound)}"
    if verdict.value is None:
        return "–", limit, Text()
    word = Text("met", "green") if verdict.met else Text("NOT MET", "bold red")
    return show(verdict.value), limit, word


def _print_readings(report: Report) -> None:
    """Print all timings of posenc and other implementations."""
    titles = {
        "call": "Attention calls: multiples of plain SDPA with the same mask",
        "layer": "Layers with projections: multiples of the same layer without positions",
    }
    for level, title in titles.items():
        timed = [r for r in report.readings if r.level == level and r.forward_ratio is not None]
        if not timed:
            continue
        OUT.print(Text(f"\n{title}", "bold"))
        errors = ("error", "gradients'") if level == "call" else ()
        table = new_table("tokens", "forward", "fwd + bwd", "memory", *errors)
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
        f"{settings['head_dim']}, {settings['dtype']}; {settings['rounds']} rounds; "
        f"{versions}. {report.seconds / 60:.1f} minutes."
    )
