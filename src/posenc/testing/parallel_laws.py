"""Laws about training in several processes, by torch.distributed."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from posenc.registry import ENCODINGS
from posenc.testing.stacks import run, stack, tokens
from posenc.testing.subject import LawBroken, Subject, agree

__all__ = ["broken_in_parallel"]

PROCESSES = 2


def broken_in_parallel(names: Iterable[str]) -> dict[str, str]:
    """Entries of the registry that two processes do not train as one does, with the reason.

    With the whole batch in one process, its gradients are compared with those of two processes
    that have half of it each: by ``DistributedDataParallel``, which stops where a parameter has
    no gradient, and by ``fully_shard`` of each block and of the model. One pair of processes
    (gloo, CPU) serves all entries.
    """
    with TemporaryDirectory() as folder:
        arguments = (list(names), folder)
        spawn(_work, arguments, nprocs=PROCESSES)  # type: ignore[no-untyped-call]
        found: dict[str, str] = torch.load(Path(folder) / "broken", weights_only=True)
    return found


def _work(rank: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", address, rank=rank, world_size=PROCESSES)
    broken = {}
    for name in names:
        subject = Subject.of_entry(name, ENCODINGS[name])
        try:
            _check(subject, rank)
        except Exception:
            broken[name] = traceback.format_exc(limit=-3)
        both: list[object] = [None] * PROCESSES
        dist.all_gather_object(both, name in broken)
        if any(both) and name not in broken:
            broken[name] = "it failed in the other process"
    if rank == 0:
        torch.save(broken, f"{folder}/broken")
    dist.barrier()
    dist.destroy_process_group()


def _check(subject: Subject, rank: int) -> None:
    text = tokens(2 * PROCESSES)
    own = text[rank * 2 : rank * 2 + 2]
    alone = stack(subject)
    expected = _gradients(subject, alone, text)
    data_parallel = DistributedDataParallel(stack(subject))
    for _ in range(2):  # a parameter without gradient stops the second step
        data_parallel.zero_grad()
        found = _gradients(subject, data_parallel, own)
    _compare("DistributedDataParallel", found, expected)
    sharded = stack(subject)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    _compare("fully_shard", _gradients(subject, sharded, own), expected)


def _gradients(subject: Subject, model: nn.Module, text: Tensor) -> dict[str, Tensor | None]:
    run(subject, model, text).sin().mean().backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name.removeprefix("module.")] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
    return found


def _compare(
    what: str, found: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    if found.keys() != expected.keys():
        raise LawBroken(f"{what}: other parameters than in one process")
    for name, gradient in expected.items():
        got = found[name]
        if gradient is None:
            raise LawBroken(f"{what}: {name} has no gradient")
        if got is None:
            raise LawBroken(f"{what}: {name} has no gradient in two processes")
        agree(what, f"the gradient of {name}", got, gradient, tolerance=1e-6)
