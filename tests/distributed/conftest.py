"""The pool of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool

POOLS: list[Pool] = []
"""At most one, shared by the folders that import the fixture."""


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    if not POOLS:
        POOLS.append(Pool(tmp_path_factory.mktemp("pool")))
    yield POOLS[0]
    POOLS[0].close()
