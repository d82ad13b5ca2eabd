"""Everything that is to be known of a CUDA device, in 25 minutes, as one JSON file and one page.

    python -m benchmarks.device                               all steps (make gpu-bench)
    python -m benchmarks.device --steps trial tests         (make gpu-test)
    python -m benchmarks.device --dry-run --out DIR           tiny sizes on the CPU, interpreted

Steps: the environment; the trial of kernels that ``auto`` takes only after it; the tests marked
``gpu``; what the compiler makes of the kernels for this architecture; times and memory beside SDPA,
FlexAttention and, where it is installed, flash-attn; one long call.

Each step has a share of the minutes, and what a step leaves is the next one's. Work is done in
processes of its own: what fails or hangs is recorded with its reason, and the rest goes on. Both
files are written after each step. Please send them back: they are ``device_<name>.json`` and
``.md`` in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from benchmarks.device_page import outcome, page

ROOT = Path(__file__).parent.parent

MINUTES = {"environment": 1, "trial": 2, "tests": 9, "static": 4, "times": 8, "long": 1}
"""Shares of the steps, in their order."""

WORKERS = 12
"""Processes of the tests: most of their time goes into compiling."""

ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For tests: each of their processes would start as many more as there are cores."""

OUT_OF_TIME = "out of time"

DRY_TESTS = "test_half_precision and alibi and dtype1"


@dataclass
class Step:
    """The outcome of a step.

    Args:
        state: ``"complete"``, ``"out of time"``, or the reason why it failed.
        seconds: that it took.
        results: of its items, each with its name as ``item`` and a reason as ``error`` if it
            failed.
    """

    state: str = "complete"
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)


class Worker:
    """A process of ``benchmarks.device_work``, started anew where it ends or hangs.

    Args:
        environment: variables beside those of this process.
        dry: on the CPU.
    """

    def __init__(self, environment: dict[str, str], *, dry: bool) -> None:
        self.environment, self.dry = environment, dry
        self._process: subprocess.Popen[str] | None = None
        self._answers: Queue[str] = Queue()

    def ask(self, seconds: float, **question: str) -> dict[str, Any]:
        """The answer, or ``{"error": reason}``."""
        process, seconds = self._process or self._start(), max(1.0, seconds)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except Empty:
            self.stop()
            return {"error": f"no answer in {seconds:.0f} seconds"}
        except OSError:
            line = ""
        if not line:
            code = process.wait()
            self.stop()
            return {"error": f"the process ended with code {code}"}
        answer: dict[str, Any] = json.loads(line, parse_constant=str)
        if answer.pop("ended", False):
            self.stop()
        return answer

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None:
            _end(self._process)
            self._reader.join()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.device_work", *(["--dry-run"] * self.dry)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(self.environment),
            start_new_session=True,
        )
        answers: Queue[str] = Queue()

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    answers.put(line)
            answers.put("")

        self._process, self._answers = process, answers
        self._reader = Thread(target=read, daemon=True)
        self._reader.start()
        return process


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # Tests started within a test of pytest-xdist are not its worker's.
    own = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return own | {"PYTHONPATH": path.rstrip(os.pathsep)} | more


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):  # what was not sent
            process.stdin.close()


class Run:
    """All steps, and the record that they are written to.

    Args:
        steps: names of those to be run.
        minutes: of all of them.
        out: folder of the two files.
        dry: tiny sizes on the CPU, by Triton's interpreter.
    """

    def __init__(self, steps: Sequence[str], minutes: float, out: Path, *, dry: bool) -> None:
        self.steps, self.out, self.dry = steps, out, dry
        self.began = time.monotonic()
        factor = 60 * minutes / sum(MINUTES[name] for name in steps)
        ends, total = {}, 0.0
        for name in steps:
            total += factor * MINUTES[name]
            ends[name] = total
        self.ends = ends
        interpreted = {"TRITON_INTERPRET": "1", "POSENC_TEST_DEVICE": "cpu"} if dry else {}
        self.variables = interpreted
        self.worker = Worker(interpreted, dry=dry)
        # Compiling needs Triton itself, not its interpreter.
        self.compiler = Worker({"TRITON_INTERPRET": "0"}, dry=dry) if dry else self.worker
        self.record: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "revision": _revision(),
            "dry_run": dry,
            "minutes": minutes,
            "steps": {},
        }

    def __call__(self) -> int:
        """Run the steps; the number of those with failures in the trial or tests."""
        try:
            for name in self.steps:
                step = Step()
                self.record["steps"][name] = step.__dict__
                began = time.monotonic()
                try:
                    self._fill(name, step)
                except KeyboardInterrupt:
                    step.state = "interrupted"
                    raise
                except Exception as error:
                    step.state = f"{type(error).__name__}: {error}"
                finally:
                    step.seconds = round(time.monotonic() - began, 1)
                    self.write()
                print(
                    f"{self._passed() / 60:5.1f} min  {name}: {outcome(name, step.__dict__)}",
                    flush=True,
                )
        finally:
            self.worker.stop()
            self.compiler.stop()
        return sum(bool(failures(name, step)) for name, step in self.record["steps"].items())

    def _fill(self, name: str, step: Step) -> None:
        if name == "tests":
            self._test(step)
            return
        worker = self.compiler if name == "static" else self.worker
        listed = worker.ask(self._left(name), step=name)
        if "error" in listed:
            step.state = listed["error"]
            return
        for item in listed["items"]:
            left = self._left(name)
            if left <= 0:
                step.state = OUT_OF_TIME
                step.results.append({"item": item, "error": OUT_OF_TIME})
                continue
            # One that hangs leaves time to the others.
            most = max(left / 2, 30 * MINUTES[name])
            began = time.monotonic()
            answer = worker.ask(min(left, most), step=name, item=item)
            step.results.append(
                {"item": item, **answer, "seconds": round(time.monotonic() - began, 1)}
            )

    def _test(self, step: Step) -> None:
        files = [
            str(file.relative_to(ROOT))
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.gpu" in file.read_text()
        ]
        count = max(1, min(WORKERS, (os.cpu_count() or 1) - 1))
        options = ["-q", "-m", "gpu", "-p", "benchmarks.device_tests", "-p", "no:cacheprovider"]
        options += ["--continue-on-collection-errors"]
        options += ["-k", DRY_TESTS] if self.dry else ["-n", str(count)]
        with TemporaryDirectory() as folder:
            lines, log = Path(folder) / "tests", Path(folder) / "log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *options, *files],
                    stdout=output,
                    stderr=output,
                    cwd=ROOT,
                    env=_environment(
                        {**self.variables, **ONE_COMPILER, "POSENC_TEST_LINES": str(lines)}
                    ),
                    start_new_session=True,
                )
                try:
                    process.wait(max(1.0, self._left("tests")))
                except subprocess.TimeoutExpired:
                    step.state = OUT_OF_TIME
                finally:
                    _end(process)
            found = [json.loads(line) for line in _lines(lines)]
            step.results = [each for each in found if "item" in each]
            ended = {each["item"] for each in step.results}
            collected = [item for each in found for item in each.get("collected", ())]
            step.results += [
                {"item": item, "outcome": "not run"} for item in collected if item not in ended
            ]
            if process.returncode not in (0, 1) and step.state == "complete":
                step.state = f"pytest ended with code {process.returncode}: " + _end_of(log)

    def _left(self, name: str) -> float:
        return self.ends[name] - self._passed()

    def _passed(self) -> float:
        return time.monotonic() - self.began

    def write(self) -> None:
        """Write both files as they stand."""
        self.out.mkdir(parents=True, exist_ok=True)
        steps = self.record["steps"]
        told = steps.get("environment", {"results": []})["results"]
        device = next((each["device"] for each in told if "device" in each), "unknown")
        name = "device_" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        for path, text in (
            (self.out / f"{name}.json", json.dumps(self.record, indent=1, default=str) + "\n"),
            (self.out / f"{name}.md", page(self.record)),
        ):
            part = path.with_suffix(".part")
            part.write_text(text)
            part.replace(path)


def failures(name: str, step: dict[str, Any]) -> list[str]:
    """Tests and trials that failed."""
    if name == "tests":
        return [each["item"] for each in step["results"] if each["outcome"] == "failed"]
    if name == "trial":
        return [
            each["item"] for each in step["results"] if each.get("difference", each.get("error"))
        ]
    return []


def _revision() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        yield from (line for line in path.read_text().split("\n") if line.endswith("}"))


def _end_of(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-400:]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=MINUTES, default=list(MINUTES))
    parser.add_argument("--minutes", type=float, help="of all steps (25 for all)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, by the interpreter")
    options = parser.parse_args()
    steps = [name for name in MINUTES if name in ("environment", *options.steps)]
    minutes = options.minutes or sum(MINUTES[name] for name in steps)
    return Run(steps, minutes, options.out, dry=options.dry_run)()


if __name__ == "__main__":
    sys.exit(main())
