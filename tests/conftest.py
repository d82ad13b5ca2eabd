"""What all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    """Each test starts from the same seed, and leaves no compiled code behind."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
