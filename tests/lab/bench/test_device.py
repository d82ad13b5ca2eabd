"""The script for CUDA devices: a dry run of it, and what it makes of what fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import device
from benchmarks.device_page import TITLES, page

from tests.support.versions import require_interpreter

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this system"
)
def test_a_dry_run_measures_everything(tmp_path: Path) -> None:
    require_interpreter()
    command = [sys.executable, "-m", "benchmarks.device", "--dry-run", "--out", str(tmp_path)]
    path = os.pathsep.join(str(x) for x in (ROOT / "src", os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    files = {file.suffix: file for file in tmp_path.iterdir()}
    assert set(files) == {".json", ".md"}
    record = json.loads(files[".json"].read_text())
    assert list(record["steps"]) == list(device.MINUTES)
    for name, step in record["steps"].items():
        assert step["state"] == "complete", (name, step)
        assert step["results"], name
    results = {name: step["results"] for name, step in record["steps"].items()}
    tried = {each["item"]: each for each in results["trial"]}
    assert tried["triton"]["difference"] == ""
    assert not [each for each in tried.values() if "error" in each]
    assert {each["outcome"] for each in results["tests"]} == {"passed"}
    assert results["static"][0]["loops"][0]["total"] > 0
    readings = {each["item"]: each for each in results["times"]}
    assert not [each for each in readings.values() if "error" in each]
    for name in ("posenc", "posenc triton"):
        assert readings[f"shaw, 16 × 16: {name}"]["reading"]["both_ratio"] > 0
    assert "installed" in readings["alibi, 16 × 16: flash-attn"]["reading"]["refusal"]
    assert results["long"][0]["reading"]["both_memory"] is not None
    text = files[".md"].read_text()
    assert all(f"## {title}" in text for title in TITLES.values())


def step(*results: dict[str, Any], state: str = "complete") -> dict[str, Any]:
    return {"state": state, "seconds": 1.0, "results": list(results)}


def test_the_page_shows_what_failed_and_what_was_not_reached() -> None:
    unsettled = [
        {"item": "a.py::test_a[1]", "outcome": "passed"},
        {"item": "a.py::test_a[2]", "outcome": "failed", "reason": "out of\nmemory"},
        {"item": "a.py::test_b", "outcome": "not run"},
    ]
    late = {"item": "t5, 8192 × 64: FlexAttention", "error": device.OUT_OF_TIME}
    steps = {
        "environment": step({"item": "environment", "device": "X|Y", "memory": 10**9}),
        "trial": step({"item": "triton", "difference": "its output is off"}),
        "tests": step(*unsettled, state=device.OUT_OF_TIME),
        "static": step({"item": "none, near, width 64", "error": "CompilationError: no"}),
        "times": step({"item": "t5, 8192 × 64: posenc", "error": "RuntimeError: no"}, late),
        "long": step(state="the process ended with code -9"),
    }
    record = {"date": "", "revision": "", "dry_run": False, "minutes": 25, "steps": steps}
    text = page(record)
    for words in (
        "# posenc on X|Y",
        "| its output is off |",
        "| test_a | 1 | 1 |  |  |",
        "| out of memory | test_a[2] |",
        "1 failed, 1 not run, 1 passed; out of time",
        "| CompilationError: no | none, near, width 64 |",
        "the process ended with code -9",
    ):
        assert words in text
    assert device.failures("tests", steps["tests"]) == ["a.py::test_a[2]"]
    assert device.failures("trial", steps["trial"]) == ["triton"]


class Answers(device.Worker):
    """A worker that answers by name of the item, or ends."""

    def ask(self, seconds: float, **question: str) -> dict[str, Any]:
        if "item" not in question:
            return {"items": ["first", "second"]}
        if question["item"] == "second":
            raise KeyboardInterrupt
        return {"device": "A device"}


def test_what_there_was_is_kept_when_it_is_interrupted(tmp_path: Path) -> None:
    run = device.Run(["environment", "times"], 1, tmp_path, dry=False)
    run.worker = Answers({}, dry=False)
    with pytest.raises(KeyboardInterrupt):
        run()
    record = json.loads((tmp_path / "device_a-device.json").read_text())
    assert record["steps"]["environment"]["state"] == "interrupted"
    assert record["steps"]["environment"]["results"][0]["device"] == "A device"
    assert (tmp_path / "device_a-device.md").exists()


def test_a_process_that_hangs_or_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
for line in sys.stdin:
    if "hang" in line:
        import time; time.sleep(60)
    if "end" in line:
        sys.exit(3)
    print('{"found": NaN}', flush=True)
"""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(device.subprocess, "Popen", start)
    worker = device.Worker({}, dry=True)
    assert worker.ask(30, step="a") == {"found": "NaN"}
    assert worker.ask(30, step="end") == {"error": "the process ended with code 3"}
    assert worker.ask(30, step="a") == {"found": "NaN"}
    assert worker.ask(0.1, step="hang") == {"error": "no answer in 1 seconds"}
    worker.stop()
