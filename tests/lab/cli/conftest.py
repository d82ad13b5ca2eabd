"""The command line within the process of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.commands import forked_workers, inspect_here, run_command
from tests.support.measuring import few_windows

__all__ = ["few_windows", "forked_workers"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A command sets the number of threads of its process, here that of the tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _inspected_here(monkeypatch: pytest.MonkeyPatch) -> None:
    inspect_here(monkeypatch)


@pytest.fixture
def posenc() -> Callable[..., tuple[int, str, str]]:
    """Runs a command: its exit code, and what it printed to either stream, on one line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        done = run_command(*map(str, arguments))
        return done.returncode, " ".join(done.stdout.split()), " ".join(done.stderr.split())

    return run
