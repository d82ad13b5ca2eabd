"""Run transformers' own model tests with and without posenc under the models.

``python scripts/transformers_tests.py CHECKOUT [FAMILY ...]``, where CHECKOUT is a source tree of
transformers, as near to the installed version as there is, whose tests can run without network.
Prints for every accelerated family how many of its model tests pass, and those that pass only with
the models as they are. The tests need ``parameterized`` and ``httpx``.

The same file is the pytest plugin that accelerates every model before its first forward pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from posenc.errors import ArgumentError
from posenc.integrations.transformers.accelerate import FAMILIES, accelerate

PASSED = re.compile(r"^PASSED (tests/models/(\w+)/\S+)", re.MULTILINE)
COUNTED = re.compile(r"^accelerated modules: (\d+)", re.MULTILINE)


class Accelerator:
    """Pytest plugin under which every model of transformers is accelerated when it is called."""

    def __init__(self) -> None:
        self.seen: WeakSet[Any] = WeakSet()
        self.modules = 0

    def pytest_configure(self) -> None:
        from transformers import PreTrainedModel

        call = PreTrainedModel.__call__

        def accelerated(model: Any, *arguments: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling() and model not in self.seen:
                self.seen.update([model])
                with suppress(ArgumentError):  # models of other families
                    self.modules += accelerate(model, check=False, shortest=0).accelerated
            return call(model, *arguments, **options)

        PreTrainedModel.__call__ = accelerated

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"accelerated modules: {self.modules}")


def pytest_configure(config: Any) -> None:
    """Accelerate models; called when this file is loaded as a plugin."""
    config.pluginmanager.register(Accelerator())


def passed(checkout: Path, files: Sequence[str], *, accelerated: bool) -> tuple[set[str], int]:
    """The tests of some files that pass, and the number of modules that were accelerated."""
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:randomly", "-W", "ignore"]
    if accelerated:
        command += ["-p", Path(__file__).stem]
    path = os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, *files],
        cwd=checkout,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if result.returncode not in (0, 1):  # 1: some tests failed
        said = result.stdout + result.stderr
        sys.exit(f"{said}\npytest ended with return code {result.returncode}.")
    modules = sum(map(int, COUNTED.findall(result.stdout)))
    return {match[1] for match in PASSED.finditer(result.stdout)}, modules


def main(checkout: Path, families: Sequence[str]) -> None:
    """Print the table and the tests that pass only without posenc."""
    print("| family | passed | passed accelerated | accelerated modules |\n|---|---|---|---|")
    lost: list[str] = []
    for family in families or list(FAMILIES):
        folder = checkout / "tests" / "models" / family
        files = sorted(
            str(file.relative_to(checkout)) for file in folder.glob("test_modeling_*.py")
        )
        if not files:
            sys.exit(f"{folder} has no test_modeling_*.py.")
        before, _ = passed(checkout, files, accelerated=False)
        after, modules = passed(checkout, files, accelerated=True)
        lost += sorted(before - after)
        print(f"| {family} | {len(before)} | {len(after)} | {modules} |", flush=True)
    for test in lost:
        print(f"only without posenc: {test}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
