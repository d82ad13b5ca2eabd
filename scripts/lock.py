"""Write the lock files: every package of an environment, pinned.

    python scripts/lock.py

requirements.lock holds what ``posenc[cli,ode]`` needs, requirements-test.lock what the tests need
beside it. torch is pinned without a hash, since its build differs from machine to machine, and
what torch itself brings along on machines with a GPU is left to its own metadata.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
LOCKS = {"requirements.lock": "cli,ode", "requirements-test.lock": "test"}
HEADER = "# Written by scripts/lock.py; do not edit.\n"


def resolve(extras: str) -> dict[str, str]:
    """Name and version of every package pip would install for the given extras."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--report", "-", TORCH, f"{ROOT}[{extras}]"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    pins = {}
    for item in report["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name == "posenc" or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        pins[name] = item["metadata"]["version"].split("+")[0]
    return pins


def main() -> None:
    known: dict[str, str] = {}
    for file, extras in LOCKS.items():
        pins = {name: v for name, v in resolve(extras).items() if name not in known}
        first = f"-r {next(iter(LOCKS))}\n" if known else ""
        lines = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
        (ROOT / file).write_text(HEADER + first + lines)
        known |= pins
        print(f"{file}: {len(pins)} packages")


if __name__ == "__main__":
    main()
