"""The laws about other libraries, over every encoding of the registry."""

from __future__ import annotations

import pytest

from posenc.registry import ENCODINGS
from posenc.testing import Subject
from posenc.testing.client_laws import adapters_merge


@pytest.mark.parametrize("name", ENCODINGS)
def test_adapters_merge(name: str) -> None:
    adapters_merge(Subject.of_entry(name, ENCODINGS[name]))


def test_adapters_on_borrowed_projections_merge() -> None:
    options = {"projections": "content", "max_distance": 6}
    adapters_merge(Subject.of_entry("deberta", ENCODINGS["deberta"], **options))
