"""What all tests share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def imported() -> set[str]:
    """Modules whose objects are left out of garbage collection."""
    return set()


@pytest.fixture(autouse=True)
def _from_scratch(imported: set[str]) -> Iterator[None]:
    """Each test starts from the same seed, and leaves no compiled code behind.

    Objects of imported modules are frozen: every measurement of memory collects garbage first,
    which takes most of a second where it goes through all that large libraries hold.
    """
    if len(sys.modules) > len(imported):
        imported.update(sys.modules)
        gc.collect()
        gc.freeze()
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
