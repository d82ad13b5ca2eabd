"""Timing that can be trusted on a shared machine: ratios, measured side by side."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results"


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of every contender in every round; each round runs all of them in turn."""
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of a contender's time over the base's in the same round."""
    pairs = zip(seconds[name], seconds[base], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that any operator's new tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes())
        return made


def write_results(name: str, rows: list[dict[str, object]], **settings: object) -> Path:
    """Write rows with machine, versions and date to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": settings,
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
