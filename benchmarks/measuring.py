"""Results of the scripts here, written to files."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from posenc.training.machine import describe_device

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, rows: list[dict[str, object]], **settings: object) -> Path:
    """Write rows with machine, versions and date to ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "processor": describe_device(torch.device("cpu")),
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
