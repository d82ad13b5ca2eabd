"""Attention on several ranks equals attention on one, for every encoding."""

from __future__ import annotations

import pytest

from posenc.registry import ENCODINGS
from tests.distributed.equality import LAYOUTS, SPLITS, Case
from tests.distributed.pool import Pool

NAMES = [name for name, entry in ENCODINGS.items() if set(entry.claims.sites) - {"embedding"}]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("form", ["gather", "auto"])
def test_every_encoding(pool: Pool, form: str, ranks: int) -> None:
    splits, layouts = list(SPLITS), list(LAYOUTS)
    cases = [
        Case(name, layouts[(ranks + i) % 3], splits[(2 * ranks + i) % len(splits)], form)
        for i, name in enumerate(["nope", *NAMES])
    ]
    found = pool.run("tests.distributed.equality:differences", ranks, cases=cases)
    assert found == [[]] * ranks, "\n".join(found[0])
