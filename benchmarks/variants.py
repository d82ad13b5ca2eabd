"""Kernels against one another in attention: prebuilt variants, and builds by compilers and flags.

    python benchmarks/variants.py v4 g++ clang++ [--threads 2] [--rounds 9]
    python benchmarks/variants.py v3 "g++ -march=x86-64-v3" --dtypes float32 bfloat16

Each is a value of POSENC_KERNELS, or a compiler with flags whose kernels are built first. A ratio
is the median over rounds, in which all take turns, of the time divided by the first one's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout, attend
from posenc.attention.backends.native import build, variants
from posenc.attention.user_cache import cache_folder

CACHE = cache_folder("kernels").parent / "compared"
ENCODINGS: dict[str, dict[str, Any]] = {
    "t5": {"heads": 8},
    "shaw": {"head_dim": 64},
    "deberta": {"dim": 512, "heads": 8, "head_dim": 64},
    "rope": {"head_dim": 64},
}


def use(kernels: str) -> None:
    """Have posenc compute with these from now on."""
    command, *flags = kernels.split()
    os.environ["POSENC_KERNELS"] = kernels if kernels in variants.NEEDS else "build"
    os.environ["CXX"], os.environ["POSENC_KERNEL_FLAGS"] = command, " ".join(flags)
    # Files are named by flags, not by compiler.
    os.environ["XDG_CACHE_HOME"] = str(CACHE / Path(command).name)
    build.choose.cache_clear()
    build.path.cache_clear()


def calls(length: int, dtype: torch.dtype, names: list[str]) -> dict[str, Any]:
    """Functions that compute attention once, and its gradients."""
    made: dict[str, Any] = {}
    torch.manual_seed(0)
    for name in names:
        encoding = posenc.create(name, **ENCODINGS[name])
        q, k, v = (torch.randn(1, 8, length, 64, dtype=dtype) for _ in range(3))
        grid = Grid.of(Layout.sequence(length))

        def forward(x: tuple[Tensor, ...] = (q, k, v), e: Any = encoding, g: Grid = grid) -> Tensor:
            return attend(*x, g, e, backend="native")

        def both(x: tuple[Tensor, ...] = (q, k, v), call: Any = forward) -> None:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in x)
            call(leaves).sum().backward()

        made |= {name: torch.no_grad()(forward), f"{name}, both": both}
    return made


def seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for kernels in options.kernels:
        use(kernels)
        build.build()
        if reason := build.missing():
            parser.error(f"{kernels}: {reason}")
    print(f"{'time by that of':24} {options.kernels[0]}")
    for dtype in options.dtypes:
        made = calls(options.length, getattr(torch, dtype), options.encodings)
        ratios: dict[str, list[float]] = {kernels: [] for kernels in options.kernels}
        for name, call in made.items():
            rounds: list[list[float]] = []
            for _ in range(options.rounds + 1):
                times = []
                for kernels in options.kernels:
                    use(kernels)
                    times.append(seconds(call))
                rounds.append([taken / times[0] for taken in times])
            medians = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
            for kernels, median in zip(options.kernels[1:], medians[1:], strict=True):
                ratios[kernels].append(median)
                print(f"{dtype:9} {name:14} {median:6.3f} {kernels}", flush=True)
        for kernels in options.kernels[1:]:
            mean = statistics.geometric_mean(ratios[kernels])
            print(f"{dtype:9} {'all':14} {mean:6.3f} {kernels}", flush=True)


main()
