"""Run tests as other machines would: make test-anywhere.

One run of pytest for each of ``SETTINGS``, of the test modules that mention what it changes. What
this processor cannot run is left out, and said. As a plugin of pytest, which these runs load, this
module forces what no variable of posenc or PyTorch does: whether MKL is slow, and how long
everything takes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from posenc.attention.backends import native
from posenc.attention.backends.native import build, variants
from posenc.errors import BackendRefusal

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "anywhere"
"""Folder of what the runs print, and of compiled variants."""

COPY = WORK / "src"
"""A copy of the package with the variants, for all that tests start."""

SLOW_MKL, TIMES = "POSENC_TEST_SLOW_MKL", "POSENC_TEST_TIMES"
"""Variables of the plugin: 1 or 0; the factor of what ``CLOCKS`` say."""

CLOCKS = ("perf_counter", "process_time", "thread_time")
"""Clocks that measure; ``monotonic`` is what tests and posenc wait by."""


class Setting(NamedTuple):
    """One run of tests.

    Args:
        environment: variables of the run.
        reads: pattern of text in the test modules that the setting may change.
        below: folder of them, in ``tests``.
    """

    environment: dict[str, str]
    reads: str
    below: str = ""


DISPATCH = r"\bexplain\(|\bdispatch\b|slow_mkl|missing\(|kernel is as fast|POSENC_KERNELS"
NUMBERS = r"\b[ar]tol\b|tolerance|_num_threads|TRITON_INTERPRET"
DURATIONS = r"tokens/s|seconds[\"=]|\.seconds|minutes=|perf_counter|process_time"

OLDEST = {"POSENC_KERNELS": "v3", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
NEWER = {"POSENC_KERNELS": "v4", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "4"}
SETTINGS = (
    Setting(OLDEST, rf"{DISPATCH}|{NUMBERS}", "attention"),
    Setting(NEWER, rf"{DISPATCH}|{NUMBERS}", "attention"),
    Setting({"POSENC_KERNELS": "none"}, DISPATCH),
    Setting({SLOW_MKL: "1", TIMES: "100"}, rf"{DISPATCH}|{DURATIONS}"),
    Setting({SLOW_MKL: "0", TIMES: "0.01"}, rf"{DISPATCH}|{DURATIONS}"),
)


def modules(setting: Setting) -> list[Path]:
    """Test modules that a setting may change."""
    reads = re.compile(setting.reads)
    files = sorted((ROOT / "tests" / setting.below).rglob("test_*.py"))
    return [file for file in files if reads.search(file.read_text())]


def missing(name: str, value: str) -> str | None:
    """Reason against a variable on this machine; None if it can be set."""
    if name == "POSENC_KERNELS" and value in variants.NEEDS:
        return variants.unsupported(value) or _compile(value)
    if name == "ATEN_CPU_CAPABILITY" and value != "default":
        return None if value in variants.instruction_sets() else f"needs {value}"
    return None


def _compile(variant: str) -> str | None:
    """Put a variant beside a copy of the package, where prebuilt ones lie; the reason if not."""
    file = WORK / "prebuilt" / variants.file_of(variant).name
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not file.exists():
            build.compile_kernels([build._compiler()], [f"-march=x86-64-{variant}"], file)
    except BackendRefusal as refusal:
        return str(refusal)
    source = ROOT / "src"
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(source, COPY, ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
    (COPY / variants.PREBUILT.relative_to(source)).symlink_to(file.parent)
    return None


def run(setting: Setting, workers: int) -> bool:
    """Run the tests of a setting and print a line of their numbers; True if none fails."""
    reasons = {name: missing(name, value) for name, value in setting.environment.items()}
    chosen = {name: setting.environment[name] for name, reason in reasons.items() if not reason}
    for name, reason in reasons.items():
        if reason:
            sys.stdout.write(f"{name}={setting.environment[name]} is left out: {reason}\n")
    prebuilt = chosen.get("POSENC_KERNELS") in variants.NEEDS
    path = [str(COPY if prebuilt else ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.anywhere"]
    command += ["-n", str(workers), "--dist", "worksteal", "-m", "not exhaustive and not gpu"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | chosen
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        [*command, *map(str, modules(setting))], cwd=ROOT, env=given, check=False, **output
    )
    label = " ".join(f"{name}={value}" for name, value in chosen.items())
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / f"{label}.log").write_text(done.stdout)
    *before, last = done.stdout.strip().splitlines() or ["no output"]
    failed = [line for line in before if line.startswith(("FAILED ", "ERROR "))]
    sys.stdout.write("\n  ".join([f"{label}: {last.strip('= ')}", *failed]) + "\n")
    sys.stdout.flush()
    return done.returncode == 0


@contextmanager
def elsewhere(environment: Mapping[str, str]) -> Iterator[None]:
    """Force what the variables of the plugin say."""
    with pytest.MonkeyPatch.context() as patch:
        if SLOW_MKL in environment:
            slow = environment[SLOW_MKL] == "1"
            patch.setattr(native, "slow_mkl", lambda: slow)
        factor = float(environment.get(TIMES, "1"))
        for name in CLOCKS:
            clock = getattr(time, name)
            patch.setattr(time, name, lambda clock=clock: factor * clock())
        yield


@pytest.fixture(scope="session", autouse=True)
def _elsewhere() -> Iterator[None]:
    with elsewhere(os.environ):
        yield


def main() -> int:
    """Run the command line; 1 if a test fails."""
    parser = argparse.ArgumentParser(description="Run tests as other machines would.")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--only", nargs="*", default=[], help="variables, each as NAME=VALUE")
    arguments = parser.parse_args()
    wanted = set(arguments.only)
    settings = [
        setting
        for setting in SETTINGS
        if not wanted or wanted & {"=".join(pair) for pair in setting.environment.items()}
    ]
    return min(1, sum(not run(setting, arguments.workers) for setting in settings))


if __name__ == "__main__":
    sys.exit(main())
