"""Products of linear layers: PyTorch's, oneDNN's, and oneDNN's with weights packed beforehand.

    python -m benchmarks.products
    python -m benchmarks.products --dtype bfloat16 --rows 1 16 512

The bound of what ``accelerate(model, linear="auto")`` can gain on a processor. A gradient is that
of rows and of weights. GF/s from the shortest of some rounds; nothing is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from math import inf

import torch
from benchmarks.measuring import table
from torch import Tensor
from torch.nn.functional import linear

from posenc.lab.bench.run import about
from posenc.transformers.acceleration.products import by_onednn

SHAPES = ((768, 768), (768, 3072), (3072, 768), (576, 49152))
"""Inputs and outputs: layers of base size, and SmolLM2's logits."""

ROUNDS = 7


def seconds(call: Callable[[], object]) -> float:
    """The shortest time of a call; infinite where PyTorch has no kernel."""
    shortest = inf
    try:
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            call()
            shortest = min(shortest, time.perf_counter() - begin)
    except RuntimeError:
        return inf
    return shortest


def packed(weight: Tensor, rows: int) -> Tensor | None:
    """The weight as oneDNN's kernels read it; None where there are none."""
    try:
        reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    except RuntimeError:
        return None
    return reordered


def gradients(by: Callable[..., Tensor], x: Tensor, weight: Tensor, above: Tensor) -> None:
    by(above, weight.T, None)
    by(above.T, x.T, None)


@torch.inference_mode()
def measured(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> tuple[str, ...]:
    """GF/s of the products of a shape."""
    x, above = (torch.randn(rows, size).to(dtype) for size in (inputs, outputs))
    weight = torch.randn(outputs, inputs).to(dtype)
    beforehand = packed(weight, rows)
    times = [
        seconds(partial(linear, x, weight, None)),
        seconds(partial(by_onednn, x, weight, None)),
        inf if beforehand is None else seconds(partial(by_onednn, x, beforehand, None)),
        seconds(partial(gradients, linear, x, weight, above)) / 2,
        seconds(partial(gradients, by_onednn, x, weight, above)) / 2,
    ]
    speeds = (2 * inputs * outputs * rows / time / 1e9 for time in times)
    return f"{inputs} to {outputs}", str(rows), *(f"{s:.0f}" if s else "–" for s in speeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 128, 512, 2048])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    lines = [
        measured(*shape, rows, dtype)
        for shape in SHAPES
        for rows in options.rows
        if rows * shape[0] * shape[1] < 2**34
    ]
    print(about("cpu")["device"], torch.__version__, options.dtype)
    kinds = ("PyTorch", "oneDNN", "packed", "PyTorch, gradients", "oneDNN, gradients")
    print(table(("GF/s", "rows", *kinds), lines))


if __name__ == "__main__":
    main()
