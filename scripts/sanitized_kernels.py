"""Run the CPU kernels under sanitizers over awkward shapes: make test-sanitized.

Once for each compiler that is installed and each variant that runs here, in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import Any

import torch

import posenc
from posenc import Grid, Layout
from posenc.attention import attend
from posenc.attention.backends.native.build import build
from posenc.attention.backends.native.variants import unsupported
from posenc.encoding import Encoding
from posenc.errors import BackendRefusal

OPTIONS: dict[str, dict[str, Any]] = {
    "nope": {},
    "rope": {"head_dim": 20},
    "rope+alibi": {"head_dim": 20, "heads": 2, "pairing": "adjacent", "fraction": 0.5},
    "tupe": {"dim": 32, "heads": 2, "head_dim": 20, "max_length": 1200, "buckets": None},
    "kerple": {"heads": 2},
    "shaw": {"head_dim": 20, "max_distance": 5},
    "transformer_xl": {"dim": 32, "heads": 2, "head_dim": 20},
    "deberta": {"dim": 32, "heads": 2, "head_dim": 20, "max_distance": 40, "buckets": 16},
    "fire": {"heads": 2, "hidden": 7},
    "cope": {"head_dim": 20},
    "dape": {"heads": 2, "hidden": 7},
    "grape_additive": {"dim": 32, "heads": 2, "width": 10},
    "path": {"dim": 32, "heads": 2, "head_dim": 20},
    "stick_breaking": {},
}

TARGETS = {
    "amx": "sapphirerapids",
    "emulated amx": "x86-64-v4 -include tests/support/emulated_tiles.h",
    "v4": "x86-64-v4",
    "v3": "x86-64-v3",
    "neon": "armv8-a",
}
NEEDED = {"emulated amx": "v4"}  # variants that a target runs as
FLAGS = "-O1 -g -DPOSENC_GUARDED -fsanitize=address,undefined -fno-sanitize-recover=all"
RUNTIMES = {  # loaded before Python, which knows nothing of them
    "g++": ("libasan.so", "libubsan.so", "libstdc++.so"),
    "clang++": (f"libclang_rt.asan-{os.uname().machine}.so", "libstdc++.so"),
}


def observed(encoding: Encoding, grid: Grid) -> Grid:
    """The grid with the signals of random tokens."""
    query, key = (
        encoding.observe(torch.randn(side.batch, side.length, 32), side)
        for side in (grid.query, grid.key)
    )
    return Grid(query, key, grid.causal, grid.window)


def run(
    encoding: Encoding,
    grid: Grid,
    dtype: torch.dtype,
    dropout: float,
    key_heads: int = 1,
    width: int = 20,
    *,
    capped: bool = False,
) -> None:
    """Forward and backward once, with two query heads, with sinks and a softcap if ``capped``.

    The padding of scratch memory is NaN under the sanitizer, so results have to be finite.
    """
    if encoding.causal_only and not grid.causal:
        return
    rows = max(2, grid.query.batch)
    lengths = (grid.query.length, grid.key.length, grid.key.length)
    q, k, v = (
        torch.randn(rows, heads, n, width, dtype=dtype, requires_grad=True)
        for heads, n in zip((2, key_heads, key_heads), lengths, strict=True)
    )
    grid = observed(encoding, grid)
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    extras: dict[str, Any] = {"sinks": sinks, "softcap": 2.0} if capped else {}
    with contextlib.suppress(BackendRefusal):  # PaTH, of queries that are not among the keys
        output = attend(q, k, v, grid, encoding, backend="native", dropout=dropout, **extras)
        inputs = [q, k, v, sinks, *encoding.parameters()]
        gradients = torch.autograd.grad(output.float().sum(), inputs, allow_unused=True)
        if not all(x.isfinite().all() for x in (output, *gradients) if x is not None):
            sys.exit(f"{encoding} has results that are not finite on {grid}")


def run_all() -> None:
    """All shapes, with the kernels of the environment."""
    build()
    for name, options in OPTIONS.items():
        encoding = posenc.create(name, **options)
        for n in (1, 63, 65, 600):
            keys = Layout.sequence(n)
            for grid in (
                Grid.of(keys, causal=True),
                Grid.of(keys, window=7),
                Grid(keys.slice(n // 2, n), keys),
                Grid(keys.slice(n - min(3, n), n), keys, causal=True),
                Grid(
                    Layout.sequence(n, start=0), Layout.sequence(n, start=n - n // 3), causal=True
                ),
            ):
                for dtype in (torch.float32, torch.float64, torch.bfloat16):
                    wide = torch.promote_types(dtype, torch.float32)
                    for key_heads in (1, 2):  # those of two are not repeated
                        run(encoding.to(wide), grid, dtype, 0.0, key_heads)
                run(encoding.float(), grid, torch.float32, 0.2)
                if encoding.score is None or not encoding.score.replaces_softmax:
                    run(encoding, grid, torch.float32, 0.0, capped=True)
        encoding.float()
        run(encoding, Grid.of(Layout.packed([20, 1, 44]), causal=True), torch.float32, 0.0)
        run(encoding, Grid.of(Layout.padded([65, 20], side="left")), torch.float32, 0.0)
        run(encoding, Grid.of(Layout.sequence(600)), torch.float32, 0.0)  # the most offsets
        if "head_dim" in options:  # of whole vectors: gradients are summed where they go
            narrow = posenc.create(name, **options | {"head_dim": 16})
            for grid in (Grid.of(Layout.sequence(600), causal=True), Grid.of(Layout.sequence(65))):
                run(narrow, grid, torch.float32, 0.0, 2, 16)
    swin = posenc.create("swin", heads=2, window=(5, 7))
    run(swin, Grid.of(Layout.image(5, 7)), torch.float32, 0.0)
    decomposed = posenc.create("decomposed2d", head_dim=20, size=(20, 70))
    for queries, cells in (((5, 7), (5, 7)), ((3, 70), (9, 33)), ((20, 9), (1, 1))):
        for dtype in (torch.float32, torch.bfloat16):
            run(decomposed, Grid(Layout.image(*queries), Layout.image(*cells)), dtype, 0.0)


def main() -> None:
    """``run_all`` by each compiler for each variant."""
    for compiler, runtimes in RUNTIMES.items():
        if shutil.which(compiler) is None:
            print(f"{compiler}: not installed")
            continue
        files = [
            subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
            for name in runtimes
        ]
        flags = FLAGS + " -shared-libasan" * (compiler == "clang++")
        for name, target in TARGETS.items():
            reason = unsupported(NEEDED.get(name, name))
            if reason is None:
                environment = {
                    "CXX": compiler,
                    "POSENC_KERNEL_FLAGS": f"{flags} -march={target}",
                    "ASAN_OPTIONS": "detect_leaks=0",
                    "LD_PRELOAD": " ".join(files),
                }
                command = [sys.executable, __file__, "--one"]
                subprocess.run(command, env=os.environ | environment, check=True)
            print(f"{compiler} {name}: {reason or 'no errors'}", flush=True)


if sys.argv[1:] == ["--one"]:
    run_all()
else:
    main()
