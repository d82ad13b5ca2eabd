"""Write the lock files: every package of an environment, pinned.

    python scripts/lock.py              keeps the present pins, adds what pyproject.toml newly needs
    python scripts/lock.py --upgrade    resolves everything anew

requirements.lock holds what ``posenc[cli,ode]`` needs and what builds posenc itself,
requirements-test.lock what the tests need beside it, requirements-bench.lock what the benchmarks
need beside both. Pins have no hashes and no local version, since the build of torch differs from
machine to machine, and what torch itself brings along on machines with a GPU is left to its own
metadata; Triton is pinned for the tests, which run its kernels everywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
LOCKS = {
    "requirements.lock": "cli,ode",
    "requirements-test.lock": "test",
    "requirements-bench.lock": "bench",
}
HEADER = "# Written by scripts/lock.py; do not edit.\n"
BROUGHT_BY_TORCH = ("nvidia-", "cuda-")


def build_requirements() -> list[str]:
    """Build requirements of posenc, so that installing it in place needs no network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [*project["build-system"]["requires"], "editables"]


def resolve(extras: str, constraints: list[str]) -> dict[str, str]:
    """Name and version of every package pip would install for the given extras."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", "-", "--constraint", str(file)]
        command += [TORCH, f"{ROOT}[{extras}]", *build_requirements()]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    pins = {}
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name != "posenc" and not name.startswith(BROUGHT_BY_TORCH):
            pins[name] = item["metadata"]["version"].split("+")[0]
    return pins


def pinned(file: str) -> list[str]:
    """The pins that a lock has now."""
    path = ROOT / file
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if "==" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin every package that posenc needs.")
    parser.add_argument("--upgrade", action="store_true", help="resolve everything anew")
    upgrade = parser.parse_args().upgrade
    kept = [] if upgrade else [pin for file in LOCKS for pin in pinned(file)]
    known: dict[str, str] = {}
    for file, extras in LOCKS.items():
        constraints = sorted({*kept, *(f"{name}=={version}" for name, version in known.items())})
        pins = {
            name: version
            for name, version in resolve(extras, constraints).items()
            if name not in known and (extras == "test" or name != "triton")
        }
        first = f"-r {next(iter(LOCKS))}\n" if known else ""
        lines = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
        (ROOT / file).write_text(HEADER + first + lines)
        known |= pins
        print(f"{file}: {len(pins)} packages")


if __name__ == "__main__":
    main()
