"""The state of a training, written atomically: one file, or a folder of shards of several ranks.

A folder of shards is complete when it has its name, ``checkpoint-STEP``. Any number of ranks reads
it. Its metadata is a pickle, which runs code when it is read: read no folder from a source that you
do not trust.
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from posenc.errors import CheckpointError, OutputError, PosencError
from posenc.lab.training.ranks import Strategy, TrainingRanks
from posenc.storage import (
    RESTORE,
    WRITTEN,
    Shapes,
    load_tensors,
    read_json,
    save_tensors,
    unwritable,
    write_json,
)

CHECKPOINT = "checkpoint.safetensors"

TRAIN_ANEW = "Delete it to train this run anew."

LARGEST_GENERATOR = 1 << 16
"""Bytes of the state of a random generator; PyTorch's has 5,056."""


WARMUP = FLOOR = 0.05


def warmup_cosine(step: int, steps: int) -> float:
    """A linear rise over the first twentieth of the steps, then a cosine to a twentieth."""
    rising = max(1.0, WARMUP * steps)
    if step < rising:
        return min(1.0, (step + 1) / rising)
    progress = (step - rising) / max(1.0, steps - rising)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Optimisation of one run.

    Args:
        encoding, seed: of the run.
        steps: optimiser steps in all.
        rate: peak learning rate.
        device: as ``torch.device`` reads it.
        precision: as Lightning Fabric reads it.
        folder: an existing folder for its checkpoint; None keeps none.
        weight_decay: of AdamW.
        schedule: share of the peak rate, from (step, steps).
        strategy: how several ranks train one model: ``"ddp"`` (each holds all of it) or ``"fsdp"``
            (FSDP2: each holds a shard).
        accumulate: parts that each rank's rows of a batch are computed in, one after the other.
    """

    encoding: str
    seed: int
    steps: int
    rate: float
    device: str = "cpu"
    precision: str = "32-true"
    folder: Path | None = None
    weight_decay: float = 0.01
    schedule: Callable[[int, int], float] = warmup_cosine
    strategy: Strategy = "ddp"
    accumulate: int = 1

    def shared(self) -> dict[str, Any]:
        """Fields that are the same on all ranks, by name, and whether there is a folder."""
        unshared = ("device", "folder", "schedule")
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: x for n, x in values.items() if n not in unshared} | {"saves": bool(self.folder)}

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's file, of a training in one process."""
        return None if self.folder is None else self.folder / CHECKPOINT


class TrainingState:
    """State of a training: weights, optimiser, generators, losses and progress.

    Args:
        model, optimizer: their tensors are saved, and restored in place.
        plan: of the training.
        fingerprint: of the task; a checkpoint with another one is refused.
        ranks: that train together. Several write a folder of shards, which any number can read.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        plan: TrainingPlan,
        fingerprint: str,
        ranks: TrainingRanks | None = None,
    ) -> None:
        self.step = 0
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self.losses = torch.zeros(plan.steps, device=plan.device)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._ranks = TrainingRanks(None) if ranks is None else ranks
        self._identity = {"fingerprint": fingerprint} | {
            name: getattr(plan, name)
            for name in ("encoding", "seed", "steps", "rate", "device", "precision")
        }

    def diverged(self) -> int | None:
        """The first step with a loss that is not finite, else the last if weights are not after it.

        None if all are. Every rank must call it.
        """
        bad = (~torch.isfinite(self.losses[: self.step])).nonzero()
        if len(bad):
            return int(bad[0, 0])
        shards = (getattr(x, "to_local", lambda x=x: x)() for x in self._model.parameters())
        broken = self._ranks.any(not all(bool(x.isfinite().all()) for x in shards))
        return self.step - 1 if any(broken) else None

    def save(self) -> None:
        """Write the state to ``plan.folder``, if it has one, or raise OutputError."""
        path = self._plan.checkpoint
        if path is None:
            return
        tensors = {f"model.{name}": x for name, x in self._weights().items()}
        for name, parameter in self._model.named_parameters():
            for key, x in self._optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = x
        tensors["losses"] = self.losses
        meta = {
            "identity": self._identity,
            "step": self.step,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        if self._ranks.mesh is not None:
            save_shards(path.parent, tensors, meta, self._ranks)
            return
        tensors["generator"] = torch.get_rng_state()
        if self.losses.is_cuda:
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.losses.device)
        save_tensors(path, tensors, meta)

    def restore(self) -> None:
        """Take the state from ``plan.folder``, if there is one.

        Raises:
            CheckpointError: when it is damaged, or of another run.
        """
        path = self._plan.checkpoint
        if path is None:
            return
        alone = self._ranks.mesh is None
        existing = path if path.exists() else None
        source = existing if alone else newest(path.parent, self._ranks)
        if source is None:
            return
        fits = partial(self._require_fit, source)
        if alone:
            tensors, meta = load_tensors(source, fits=fits, remedy=TRAIN_ANEW)
        else:
            tensors, meta = _load_shards(source, fits, self._shaped, self._ranks)
        try:
            self._take(tensors)
        except (KeyError, RuntimeError, TypeError) as error:
            raise _others(source, str(error)) from error
        self.step, self.seconds = meta["step"], meta["seconds"]
        self.peak_memory_bytes = meta["peak_memory_bytes"]

    def _shaped(self, name: str) -> Tensor:
        """A new tensor of the type, shape and sharding that this rank has of a stored one."""
        if name == "losses":
            return torch.zeros_like(self.losses)
        kind, _, rest = name.partition(".")
        if kind == "model":
            return torch.empty_like(self._weights()[rest], requires_grad=False)
        of, _, key = rest.rpartition(".")
        parameter = self._model.get_parameter(of)
        if key == "step":
            return torch.zeros((), device=parameter.device)
        return torch.empty_like(parameter, requires_grad=False)

    def _require_fit(self, path: Path, shapes: Shapes, meta: dict[str, Any]) -> None:
        """Refuse the state of another run, before any of it is read."""
        if meta.get("identity") != self._identity:
            raise CheckpointError(
                str(path),
                expected=f"the state of {self._identity}",
                got=f"that of {meta.get('identity')}",
                remedy="Use the settings it was made with, or another folder.",
            )
        step, seconds, peak = (meta.get(n) for n in ("step", "seconds", "peak_memory_bytes"))
        counted = type(step) is int and 0 <= step <= self._plan.steps
        if not (counted and type(seconds) in (int, float) and type(peak) is int):
            raise _others(path, f"step {step}, {seconds} seconds, {peak} bytes")
        weights = {f"model.{name}": tuple(x.shape) for name, x in self._weights().items()}
        _require_shapes(path, self._model, shapes, weights | {"losses": tuple(self.losses.shape)})

    @torch.no_grad()
    def _take(self, tensors: dict[str, Tensor]) -> None:
        for name, x in self._weights().items():
            x.copy_(tensors[f"model.{name}"])
        for name, parameter in self._model.named_parameters():
            prefix = f"optimizer.{name}."
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix): x.to(parameter.device)
                for key, x in tensors.items()
                if key.startswith(prefix)
            }
        self.losses.copy_(tensors["losses"])
        if self._ranks.mesh is None:
            torch.set_rng_state(tensors["generator"])
        if self.losses.is_cuda and self._ranks.mesh is None:
            torch.cuda.set_rng_state(tensors["generator.cuda"], self.losses.device)

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and buffers, each once though layers may share it."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}


def _require_shapes(path: Path, model: nn.Module, stored: Shapes, wanted: Shapes) -> None:
    """Refuse a state with tensors that are missing, unknown or of another shape than ``wanted``.

    Besides those it has optimiser states, scalars or of a parameter's shape, and generators.
    """
    for name in sorted(wanted):
        if stored.get(name) != wanted[name]:
            raise _others(path, f"{name} of shape {stored.get(name)}, not {wanted[name]}")
    parameters = {f"optimizer.{name}": tuple(x.shape) for name, x in model.named_parameters()}
    for name in sorted(stored.keys() - wanted.keys()):
        shape = stored[name]
        if name.startswith("generator"):
            fits = len(shape) == 1 and shape[0] <= LARGEST_GENERATOR
        else:
            fits = shape in ((), parameters.get(name.rpartition(".")[0]))
        if not fits:
            raise _others(path, f"{name} of shape {shape}")


def _others(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        expected="the state of this model's training",
        got=got,
        remedy="It comes from another version of posenc: delete it to train anew.",
    )


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


def _require_shared(folder: Path, ranks: TrainingRanks) -> None:
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
    _require_shared(folder, ranks)
    latest: list[str | None] = [max((p.name for p in folder.glob(f"{PREFIX}*")), default=None)]
    dist.broadcast_object_list(latest, group=ranks.group, group_src=0)
    return None if latest[0] is None else folder / latest[0]


def _load_shards(
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
