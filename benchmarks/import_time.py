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
import time
began = time.perf_counter()
import torch
middle = time.perf_counter()
import posenc
print(1000 * (middle - began), 1000 * (time.perf_counter() - began))
"""


def measure() -> tuple[float, float]:
    """Milliseconds until torch is there, and until posenc is there as well."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    torch, both = done.stdout.split()
    return float(torch), float(both)


def main() -> None:
    parser = argparse.ArgumentParser(description="What posenc adds to the import of torch.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    measure()  # fills the caches of the disk and of compiled modules
    times = [measure() for _ in range(rounds)]
    added = statistics.median(both - torch for torch, both in times)
    verdict = "met" if added <= LIMIT else "NOT MET"
    print(f"import torch:  {statistics.median(torch for torch, _ in times):6.0f} ms")
    print(f"with posenc:   {statistics.median(both for _, both in times):6.0f} ms")
    print(f"posenc adds:   {added:6.0f} ms (limit {LIMIT:.0f}: {verdict}; median of {rounds})")


if __name__ == "__main__":
    main()
