"""The command line within the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.commands import forked_workers, inspect_here
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
