"""Training on several ranks: the losses and weights of one process, stopped, killed or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.models import MODELS
from tests.distributed.pool import Pool
from tests.lab.training import elastic
from tests.support.processes import forking

HERE = "tests.lab.training.spread"

KINDS = [kind for kind in MODELS if MODELS[kind].__module__.startswith("posenc.models.")]
"""Those of ``posenc.models``: tasks and examples may have registered more."""

WHOLE = ("decoder", "deberta", "swin")
"""Kinds that are trained by DDP in the suite."""

KINDS_APART = [kind for kind in KINDS if kind not in WHOLE]

Result = tuple[list[float], dict[str, list[float]]]


def assert_close(result: Result, expected: Result) -> None:
    """Equal losses; weights would not be, as Adam normalises gradients that are all rounding."""
    losses, wanted = (torch.tensor(losses) for losses, _ in (result, expected))
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0.0)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Result]:
    """Trainings of one process, by model."""
    return {kind: pool.run(f"{HERE}:trained", 1, kind=kind)[0] for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        # DDP takes a model as a whole, FSDP takes it apart.
        *((kind, "fsdp") for kind in KINDS),
        *((kind, "ddp") for kind in WHOLE),
        *(pytest.param(kind, "ddp", marks=pytest.mark.exhaustive) for kind in KINDS_APART),
    ],
)
def test_two_ranks_train_as_one(
    pool: Pool, alone: dict[str, Result], kind: str, strategy: str
) -> None:
    first, second = pool.run(f"{HERE}:trained", 2, kind=kind, strategy=strategy)
    assert_close(first, alone[kind])
    assert second[0] == first[0]
    sizes = {name: len(values) for name, values in first[1].items()}
    assert sizes == {name: len(values) for name, values in alone[kind][1].items()}
    assert not second[1]


@pytest.mark.parametrize("encoding", ["shaw", "transformer_xl", "floater"])
def test_layers_with_any_encoding_are_sharded(pool: Pool, encoding: str) -> None:
    job: dict[str, Any] = {"kind": "decoder", "encoding": encoding, "steps": 3}
    whole = pool.run(f"{HERE}:trained", 1, **job)[0]
    assert_close(pool.run(f"{HERE}:trained", 2, strategy="fsdp", **job)[0], whole)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_accumulated_parts_are_one_step(
    pool: Pool, alone: dict[str, Result], ranks: int, strategy: str
) -> None:
    job = {"kind": "decoder", "strategy": strategy, "accumulate": 2}
    assert_close(pool.run(f"{HERE}:trained", ranks, **job)[0], alone["decoder"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stopped_run_goes_on_by_any_number_of_ranks(
    pool: Pool, alone: dict[str, Result], tmp_path: Path, strategy: str
) -> None:
    job: dict[str, Any] = {"kind": "decoder", "strategy": strategy, "folder": str(tmp_path)}
    for ranks, after in ((2, 2), (4, 2), (3, 3)):
        for message in pool.run(f"{HERE}:stopped", ranks, after=after, **job):
            assert "to continue" in message
        assert len(list(tmp_path.iterdir())) == 1
    other = "fsdp" if strategy == "ddp" else "ddp"
    assert_close(pool.run(f"{HERE}:trained", 2, **{**job, "strategy": other})[0], alone["decoder"])


def test_killed_ranks_lose_the_steps_since_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    job: dict[str, Any] = {"kind": "decoder", "strategy": "fsdp"}
    unbroken = pool.run(f"{HERE}:trained", 2, **job)
    first = [
        pool.run(f"{HERE}:killed", 2, at=at, folder=str(tmp_path), **job)[0] for at in (2, 5, 99)
    ]
    assert first == [1, 2, 5]
    resumed = pool.run(f"{HERE}:trained", 2, folder=str(tmp_path), **job)
    assert resumed == unbroken


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked from a server")
def test_rank_killed_under_torchrun(pool: Pool, tmp_path: Path) -> None:
    """The agent of torchrun starts all ranks again, and they end with the bits of no kill."""
    job: dict[str, Any] = {"kind": "decoder", "strategy": "fsdp", "steps": elastic.STEPS}
    (unbroken, _) = pool.run(f"{HERE}:trained", 2, **job)
    context = forking()
    results = context.SimpleQueue()
    agent = context.Process(target=elastic.launch, args=("decoder", str(tmp_path), 3, results))
    agent.start()
    agent.join(60)
    exitcode = agent.exitcode
    agent.kill()
    assert exitcode == 0
    begun, losses, weights = results.get()[0]
    assert begun == 2  # the step after the last checkpoint is trained again
    assert (losses, weights) == unbroken


@pytest.mark.parametrize(
    ("ranks", "job", "settings", "message"),
    [
        (1, "refused", {"accumulate": 0}, "accumulate: expected 1 or more"),
        (1, "refused", {"strategy": "fdsp"}, "Did you mean 'fsdp'"),
        (2, "refused", {"accumulate": 3}, "at least 6 rows, for 2 ranks of 3 parts, got 5"),
        (3, "refused_differing", {"what": "plan"}, "others on rank 2 than on rank 0"),
        (3, "refused_differing", {"what": "model"}, "others on rank 2 than on rank 0"),
        (3, "refused_differing", {"what": "folder"}, "rank 2 does not find what rank 0 wrote"),
    ],
)
def test_trainings_that_cannot_be_are_refused_by_every_rank(
    pool: Pool, tmp_path: Path, ranks: int, job: str, settings: dict[str, Any], message: str
) -> None:
    for text in pool.run(f"{HERE}:{job}", ranks, folder=str(tmp_path), **settings):
        assert message in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_damaged_shards_are_named(pool: Pool, tmp_path: Path) -> None:
    job: dict[str, Any] = {"kind": "decoder", "folder": str(tmp_path)}
    pool.run(f"{HERE}:stopped", 2, after=3, **job)
    (folder,) = tmp_path.iterdir()
    (folder / ".metadata").write_bytes(b"no")
    for message in pool.run(f"{HERE}:refused", 2, folder=str(tmp_path)):
        assert "checkpoint-000000003" in message
