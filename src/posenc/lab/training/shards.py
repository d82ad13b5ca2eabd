"""Training states of several ranks: folders of shards, by ``torch.distributed.checkpoint``.

A folder is complete when it has its name, ``checkpoint-STEP``. Any number of ranks reads it. Its
metadata is a pickle, which runs code when it is read: read no folder from a source that you do not
trust.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from posenc.errors import CheckpointError, OutputError, PosencError
from posenc.lab.training.ranks import TrainingRanks
from posenc.storage import RESTORE, WRITTEN, Shapes, read_json, unwritable, write_json

PREFIX = "checkpoint-"
META = "state.json"


def save_shards(
    folder: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any], ranks: TrainingRanks
) -> None:
    """Write ``folder/checkpoint-STEP``, whole or not at all, and delete older ones.

    What killed runs have left behind is deleted too.

    Args:
        folder: existing, seen by all ranks.
        tensors: whole or sharded.
        meta: JSON values, with ``step``.
        ranks: all of which call it.

    Raises:
        OutputError: if it cannot be written.
    """
    final = folder / f"{PREFIX}{meta['step']:09d}"
    partial = folder / f".{final.name}.partial"
    try:
        if ranks.rank == 0:
            for killed in folder.glob(f".{PREFIX}*.partial"):
                shutil.rmtree(killed, ignore_errors=True)
        ranks.wait()
        save(dict(tensors), checkpoint_id=partial, process_group=ranks.group)
        if ranks.rank == 0:
            write_json(partial / META, meta)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for older in folder.glob(f"{PREFIX}*"):
                if older != final:
                    shutil.rmtree(older, ignore_errors=True)
        ranks.wait()
    except PosencError:
        raise
    except OSError as error:
        raise unwritable(final, error) from error


def require_shared(folder: Path, ranks: TrainingRanks) -> None:
    """Check that all ranks see what the first writes in a folder.

    Raises:
        OutputError: on every rank, with those that do not.
    """
    name = [f".{secrets.token_hex(8)}.partial"]
    dist.broadcast_object_list(name, group=ranks.group, group_src=0)
    mark = folder / name[0]  # a new name, which no file system answers from its memory
    with suppress(OSError):
        if ranks.rank == 0:
            mark.touch()
    ranks.wait()
    exists = mark.exists()
    blind = ranks.any(*(rank == ranks.rank and not exists for rank in range(ranks.size)))
    with suppress(OSError):
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)
    if any(blind):
        names = ", ".join(str(rank) for rank, is_blind in enumerate(blind) if is_blind)
        raise OutputError(
            "folder",
            expected="one that all ranks share and rank 0 can write",
            got=f"{folder}, in which rank {names} does not find what rank 0 wrote",
            remedy="Make it on a file system that all nodes share.",
        )


def newest(folder: Path, ranks: TrainingRanks) -> Path | None:
    """The latest complete state in a folder, as the first rank sees it.

    Raises:
        OutputError: if the ranks do not share the folder.
    """
    require_shared(folder, ranks)
    latest: list[str | None] = [max((p.name for p in folder.glob(f"{PREFIX}*")), default=None)]
    dist.broadcast_object_list(latest, group=ranks.group, group_src=0)
    return None if latest[0] is None else folder / latest[0]


def load_shards(
    path: Path,
    fits: Callable[[Shapes, dict[str, Any]], None],
    shaped: Callable[[str], Tensor],
    ranks: TrainingRanks,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata written by ``save_shards``, by as many ranks or others.

    Args:
        path: the folder.
        fits: called with shapes and metadata before any tensor is read; its errors propagate.
        shaped: a new tensor to read a name into.
        ranks: all of which call it.

    Raises:
        CheckpointError: if it is damaged.
    """
    meta = read_json(path / META)
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors_of = {n: s for n, s in stored.items() if isinstance(s, TensorStorageMetadata)}
        fits({name: tuple(item.size) for name, item in tensors_of.items()}, meta)
        tensors = {name: shaped(name) for name in tensors_of}
        load(tensors, checkpoint_id=path, process_group=ranks.group)
    except PosencError:
        raise
    except Exception as error:  # the library raises errors of several kinds
        raise CheckpointError(str(path), expected=WRITTEN, got=error, remedy=RESTORE) from error
    return tensors, meta
