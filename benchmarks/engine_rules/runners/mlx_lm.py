"""Logits of mlx-lm, on the processor in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from loop import main

sys.path.append(sys.path.pop(0))  # this file has the name of the package, which is to come first


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Logits of a checkpoint whose weights are float32."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # kernels would be built by a compiler of the machine
    model, _ = load_model(folder)

    def run(tokens: list[int]) -> np.ndarray:
        logits = model(mx.array(tokens)[None])
        if logits.dtype != mx.float32:
            raise RuntimeError(f"computed in {logits.dtype}")
        return np.array(logits[0])

    return run


def release() -> str:
    return version("mlx-lm")


if __name__ == "__main__":
    main(load, release)
