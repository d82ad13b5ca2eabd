"""``posenc bench``: speed of attention with encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, TimeElapsedColumn

from posenc.lab.bench import BenchOptions
from posenc.lab.cli.console import (
    Display,
    PlainTextColumn,
    command_line,
    print_json,
    print_report,
    print_study,
)
from posenc.lab.cli.options import SEVERAL_ENCODINGS, FromFile, Json, Quiet, with_settings

QUICK_ROUNDS = 3


@with_settings(BenchOptions, encodings=SEVERAL_ENCODINGS)
def bench(
    *,
    fields: dict[str, Any] | None = None,
    causal: Annotated[
        bool | None,
        Parameter(negative="--bidirectional", help="The mask.", show_default="causal where needed"),
    ] = None,
    quick: Annotated[bool, Parameter(help="Fewer rounds.")] = False,
    out: Annotated[
        Path | None, Parameter(help="Output folder for the report.", show_default="none")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    file: FromFile | None = None,
) -> None:
    """Time attention with encodings against plain SDPA.

    Times are medians of ratios to plain SDPA with the same mask and dtype in the same round. In a
    checkout, python -m benchmarks.attention measures more: memory, errors, other implementations.

    Examples:

        posenc bench --quick --out speeds

        posenc bench --encodings t5 --lengths 1024,4096 --backends auto,blockwise

        posenc bench --device cuda --causal
    """
    import torch

    from posenc.lab.bench.report import opening, results_table, write_bench
    from posenc.lab.bench.run import BenchSettings
    from posenc.lab.bench.run import bench as run_benchmark
    from posenc.lab.folders import output_folder, require_unused
    from posenc.lab.training.machine import cores

    if out is not None:
        require_unused(out)
    usual = {"threads": cores()} | ({"rounds": QUICK_ROUNDS} if quick else {})
    settings = BenchSettings(causal=causal, **(usual | (fields or {})))
    torch.set_num_threads(settings.threads or 1)
    with BenchDisplay(shown=not quiet and not json) as display:
        report = run_benchmark(settings, progress=display)
    opened = opening(report)
    if out is not None:
        with output_folder(out) as partial:
            write_bench(report, partial, command=command_line())
    if json:
        print_json(opened.to_json() | report.to_json())
        return
    print_study(opened, [results_table(report)])
    if out is not None:
        print_report(out / "index.html")


class BenchDisplay(Display):
    """A bar on a terminal, elsewhere a line for each step."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(
            PlainTextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            PlainTextColumn("{task.description}"),
            shown=shown,
        )
        self.task = self.bars.add_task("", total=1.0)

    def __call__(self, title: str, share: float) -> None:
        if self.live:
            self.bars.update(self.task, completed=share, description=title)
        else:
            self.emit(f"[{share:4.0%}] {title}")
