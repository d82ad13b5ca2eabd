"""The loop of a runner, which needs numpy and the standard library alone.

    PYTHON runners/NAME.py JOBS OUT
    PYTHON runners/NAME.py --release

JOBS has a line ``{"name": …, "folder": …}`` for each checkpoint folder, whose ``tokens.json`` has
token ids by length. OUT gets ``NAME.npz`` with the arrays of each length, or ``NAME.txt`` with the
reason for which the engine does not run it. A job that has a result is skipped, and one that ended
its process before has none but ``NAME.begun``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

Computed = np.ndarray | Mapping[str, np.ndarray]
"""Logits or log-probabilities [tokens, vocabulary], or named arrays of a rotation."""

Run = Callable[[list[int]], Computed]
"""One text in a loaded model, from its first position on."""


def main(load: Callable[[Path], Run], release: Callable[[], str]) -> None:
    """Run the jobs of the command line.

    Args:
        load: opens a checkpoint folder of transformers in the engine, in float32 throughout.
        release: the engine's version.
    """
    if sys.argv[1:] == ["--release"]:
        print(release())
        return
    jobs, out = map(Path, sys.argv[1:])
    for line in jobs.read_text().splitlines():
        job = json.loads(line)
        result, reason, begun = (out / (job["name"] + end) for end in (".npz", ".txt", ".begun"))
        if result.exists() or reason.exists():
            continue
        if begun.exists():
            reason.write_text("its process ended\n")
            continue
        result.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
        try:
            arrays = _arrays(load, Path(job["folder"]))
        except Exception as error:  # of any engine: it is what is asked
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            reason.write_text(f"{type(error).__name__}: {lines[-1] if lines else ''}\n")
        else:
            with result.open("wb") as file:
                np.savez(file, **arrays)
        begun.unlink()


def _arrays(load: Callable[[Path], Run], folder: Path) -> dict[str, np.ndarray]:
    """Arrays by length, or by length and name in it."""
    run, arrays = load(folder), {}
    for length, tokens in json.loads((folder / "tokens.json").read_text()).items():
        computed = run(tokens)
        named = computed if isinstance(computed, Mapping) else {"": computed}
        for name, array in named.items():
            arrays["/".join(filter(None, (length, name)))] = np.asarray(array, dtype=np.float32)
    return arrays
