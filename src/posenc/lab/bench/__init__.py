"""Time of attention with encodings, relative to attention without, in one run.

Each round runs all passes in turn, so that the load of the machine affects all of them; reported
are medians over rounds of the ratio to plain SDPA in the same round.

    from posenc.lab.bench.run import BenchSettings, bench

    report = bench(BenchSettings(encodings=["t5", "alibi"], lengths=[1024]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from posenc.arguments import EXACT, Count, Interval, Width
from posenc.lab.declared import Option

METHODS = (
    *("nope", "rope", "alibi", "sandwich", "t5@frozen", "t5", "kerple", "tupe"),
    *("swin", "decomposed2d", "shaw@scores", "shaw", "transformer_xl", "deberta@buckets=256"),
    *("forgetting", "cable", "fire", "cope", "stick_breaking", "grape_additive", "dape", "path"),
)
"""Encodings timed by default: all kinds of terms."""

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The fields, described at ``BenchSettings``; without imports that slow a command down."""

    encodings: Annotated[
        Sequence[str], Option("Encodings: t5,t5@frozen,rope+alibi.", f"{len(METHODS)} of all kinds")
    ] = METHODS
    lengths: Annotated[
        Sequence[Annotated[int, Interval(2, EXACT)]] | None,
        Option("Sequence lengths, comma-separated.", "2048; 8192 on CUDA"),
    ] = None
    backends: Annotated[Sequence[str], Option("Backends of posenc, comma-separated.", "auto")] = (
        "auto",
    )
    heads: Annotated[Count, Option("Attention heads.")] = 8
    head_dim: Annotated[Width, Option("Width of a head.")] = 64
    rounds: Annotated[Count, Option("Timing rounds.", "7, or 3 if quick")] = 7
    threads: Annotated[Count | None, Option("CPU threads.", "one per core")] = None
    device: Annotated[str, Option("Device: cpu, cuda or cuda:N.")] = "cpu"
    dtypes: Annotated[
        Sequence[Dtype] | None,
        Option("Dtypes of q, k, v, comma-separated.", "float32; bfloat16 on CUDA", name="dtype"),
    ] = None
