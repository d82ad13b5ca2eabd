"""Time that ``import posenc`` adds to ``import torch``, in fresh processes.

python -m benchmarks.import_time [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

LIMIT = 150.0
"""Milliseconds that the import may add."""

PROGRAM = """
import gc, time
began = time.perf_counter()
import torch
middle, sign = time.perf_counter(), {"start": -1, "stop": 1}
collected = []
gc.callbacks.append(lambda phase, _: collected.append(sign[phase] * time.perf_counter()))
import posenc
print(1000 * (middle - began), 1000 * (time.perf_counter() - began), 1000 * sum(collected))
"""


def measure() -> tuple[float, float, float]:
    """Milliseconds until torch is there, until posenc is as well, and of collections in between."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    torch, both, collected = map(float, done.stdout.split())
    return torch, both, collected


def main() -> None:
    parser = argparse.ArgumentParser(description="What posenc adds to the import of torch.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    measure()  # fills the caches of the disk and of compiled modules
    times = [measure() for _ in range(rounds)]
    added = statistics.median(both - torch for torch, both, _ in times)
    verdict = "met" if added <= LIMIT else "NOT MET"
    print(f"import torch:  {statistics.median(torch for torch, *_ in times):6.0f} ms")
    print(f"with posenc:   {statistics.median(both for _, both, _ in times):6.0f} ms")
    print(f"posenc adds:   {added:6.0f} ms (limit {LIMIT:.0f}: {verdict}; median of {rounds})")
    collected = statistics.median(collected for *_, collected in times)
    print(f"  of it       {collected:6.0f} ms that Python collects garbage, of torch's objects too")


if __name__ == "__main__":
    main()
