"""Folders of sharded checkpoints: whole whenever they have their name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from posenc.lab.training import checkpoint
from posenc.lab.training.ranks import TrainingRanks

WRITES = 8
"""More than the changes of the file system by which a state is saved."""


class Killed(BaseException):
    """The process ends."""


def save(tensors: Mapping[str, Tensor], *, checkpoint_id: Path, process_group: object) -> None:
    checkpoint_id.mkdir()
    (checkpoint_id / "tensors").touch()


@pytest.mark.parametrize("killed_at", range(WRITES))
def test_killed_while_saving(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any change of the file system; the newest state that is found is complete."""
    left = WRITES

    def killed_before(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*args, **options)

        return run

    alone = TrainingRanks(None)
    monkeypatch.setattr(checkpoint, "save", killed_before(save))
    monkeypatch.setattr(checkpoint, "write_json", killed_before(checkpoint.write_json))
    monkeypatch.setattr(shutil, "rmtree", killed_before(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", killed_before(Path.rename))
    checkpoint.save_shards(tmp_path, {}, {"step": 1}, alone)
    left, done = killed_at, False
    try:
        checkpoint.save_shards(tmp_path, {}, {"step": 2}, alone)
        done = True
    except Killed:
        pass
    monkeypatch.setattr(checkpoint.dist, "broadcast_object_list", lambda *_, **options: None)
    newest = checkpoint.newest(tmp_path, alone)
    assert newest == max(tmp_path.glob(f"{checkpoint.PREFIX}*"))
    assert {path.name for path in newest.iterdir()} == {"tensors", checkpoint.META}
    assert not done or newest.name.endswith("2")
    assert done or killed_at < WRITES - 1
    left = WRITES
    checkpoint.save_shards(tmp_path, {}, {"step": 3}, alone)
    assert [path.name for path in tmp_path.iterdir()] == [f"{checkpoint.PREFIX}000000003"]
