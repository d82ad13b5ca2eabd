"""Models of transformers that were sharded by FSDP2 before they are accelerated."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

HERE = "tests.transformers.acceleration.sharded"


@pytest.mark.parametrize("held", [False, True], ids=["itself", "held"])
@pytest.mark.parametrize("kind", ["mistral", "bloom"])
def test_sharded_models_are_compared_where_they_can_be_called(
    pool: Pool, kind: str, held: bool
) -> None:
    for report, served, restored in pool.run(f"{HERE}:accelerated", 2, kind=kind, held=held):
        assert ("Largest difference" in report) is not held
        assert ("call accelerate before that" in report) is held
        assert "Error" not in report
        assert max(served, restored) < 1e-5


@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_sharded_models_are_stretched(pool: Pool, method: str) -> None:
    errors = pool.run(f"{HERE}:stretched", 2, kind="qwen3", method=method)
    assert max(errors) < 1e-5
