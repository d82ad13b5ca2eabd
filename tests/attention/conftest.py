"""Fixtures of the tests of attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
