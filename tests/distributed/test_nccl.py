"""Attention over CUDA devices, by NCCL, equals attention on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.equality import LAYOUTS, SPLITS, Case
from tests.distributed.pool import MOST, Pool
from tests.distributed.test_equality import NAMES, check

DEVICES = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"{DEVICES} CUDA devices, of which it needs two"),
]


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A process on each of two to ``MOST`` devices."""
    pool = Pool(tmp_path_factory.mktemp("nccl"), backend="nccl", most=min(DEVICES, MOST))
    yield pool
    pool.close()


@pytest.mark.parametrize("form", ["gather", "ring", "auto"])
def test_every_encoding(devices: Pool, form: str) -> None:
    splits, layouts = list(SPLITS), list(LAYOUTS)
    names = ["nope", "rope", "alibi", "t5"] if form == "ring" else NAMES
    cases = [
        Case(
            *(name, layouts[i % 3], splits[i % len(splits)], form),
            dtype=torch.float64,
            device="cuda",
        )
        for i, name in enumerate(names)
    ]
    check(devices, len(devices.processes), cases)
