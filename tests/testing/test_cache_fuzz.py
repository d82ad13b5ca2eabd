"""A share of the random lives of caches, and proof that they find what is wrong."""

from __future__ import annotations

import pytest

from posenc.attention import LayerCache
from tests.testing.cache_fuzz import fuzz

PARTS, COUNT = 2, 40


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_with_a_cache_are_those_without(part: int) -> None:
    assert not fuzz(COUNT, first=part * COUNT)


def test_a_cache_that_mixes_rows_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LayerCache.select
    monkeypatch.setattr(LayerCache, "select", lambda cache, rows: whole(cache, rows.flip(0)))
    assert any("the output" in finding for finding in fuzz(20))
