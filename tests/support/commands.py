"""Commands run in the process of the tests, and the worker processes they start."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from posenc.lab.cli import main
from posenc.lab.cli.console import ERRORS, OUT
from posenc.lab.experiments import executors
from posenc.transformers.doctor import diagnosis
from posenc.transformers.doctor.facts import LayerReading
from tests.support.processes import forking


def run_command(*arguments: str | Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """Run ``posenc`` with these arguments: its exit code, and what it printed to either stream."""
    words = ["posenc", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", words)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        for console in (OUT, ERRORS):
            patch.setattr(console, "_width", columns)
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


def printed(*arguments: object) -> str:
    """Standard output, on one line, of a command that succeeds."""
    done = run_command(*map(str, arguments))
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def printed_json(*arguments: object) -> Any:
    """The JSON that a command prints."""
    return json.loads(printed(*arguments, "--json"))


def refusal(*arguments: object) -> str:
    """Standard error, on one line, of a command that refuses its input without a trace."""
    done = run_command(*map(str, arguments))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers of comparisons fork from a server that imports PyTorch once."""
    context = forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "get_context", lambda _: context)
        yield


def inspect_here(patch: pytest.MonkeyPatch) -> None:
    """Let ``doctor`` run models in this process.

    Another one imports transformers for seconds; ``test_diagnosis.py`` starts it.
    """

    def read(folder: Path, *, seconds: float) -> LayerReading:
        answer = diagnosis._inspected(folder)
        if isinstance(answer, str):
            raise diagnosis.NotRunError(answer)
        return answer

    patch.setattr(diagnosis, "read_by_running", read)
