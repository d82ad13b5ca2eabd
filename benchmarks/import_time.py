"""What ``import posenc`` adds to ``import torch``, in fresh processes.

python benchmarks/import_time.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

LIMIT = 150.0
"""Milliseconds that the import may add."""

PROGRAM = """
import time, torch
began = time.perf_counter()
import posenc
print(1000 * (time.perf_counter() - began))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, check=True, capture_output=True)
    times = [
        float(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(rounds)
    ]
    median = statistics.median(times)
    verdict = "met" if median <= LIMIT else "NOT MET"
    print(f"import posenc adds {median:.0f} ms to import torch (limit {LIMIT:.0f}: {verdict})")


if __name__ == "__main__":
    main()
