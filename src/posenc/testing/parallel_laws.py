"""Laws of distributed training."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_all_start_methods
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from posenc.models import Transformer, TransformerConfig
from posenc.models.block import Block
from posenc.registry import ENCODINGS
from posenc.testing.stacks import VOCABULARY, run, stack, tokens
from posenc.testing.subject import DIM, HEADS, LawBroken, Subject, agree, seeded

PROCESSES = 2

START = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"


def broken_in_parallel(names: Iterable[str]) -> dict[str, str]:
    """Registry entries whose gradients differ between one and two processes, with the reason.

    Each of two processes (gloo, CPU) has half of the batch, with ``DistributedDataParallel``, which
    fails if a parameter has no gradient, and with ``fully_shard`` of each block and of the model.
    An encoder–decoder (``"transformer"``) is checked too.
    """
    with TemporaryDirectory() as folder:
        arguments = (list(names), folder)
        start_processes(_work, arguments, PROCESSES, start_method=START)  # type: ignore[no-untyped-call]
        broken: dict[str, str] = torch.load(Path(folder) / "broken", weights_only=True)
    return broken


def _work(rank: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", address, rank=rank, world_size=PROCESSES)
    broken = {}
    checks = {name: partial(_check_entry, name) for name in names}
    for name, check in (checks | {"transformer": _check_transformer}).items():
        try:
            check(rank)
        except Exception:
            broken[name] = traceback.format_exc(limit=-3)
        both: list[object] = [None] * PROCESSES
        dist.all_gather_object(both, name in broken)
        if any(both) and name not in broken:
            broken[name] = "failed in the other process"
    if rank == 0:
        torch.save(broken, f"{folder}/broken")
    dist.barrier()
    dist.destroy_process_group()


def _check_entry(name: str, rank: int) -> None:
    subject = Subject.of_entry(name, ENCODINGS[name])
    text = tokens(2 * PROCESSES)

    def forward(model: nn.Module, rows: slice) -> Tensor:
        return run(subject, model, text[rows])

    _check(lambda: stack(subject), forward, rank)


def _check_transformer(rank: int) -> None:
    """Check an encoder–decoder, whose decoder blocks project the encoder's vectors."""

    def make() -> nn.Module:
        with seeded(13):
            config = TransformerConfig(
                source_vocabulary=VOCABULARY,
                target_vocabulary=VOCABULARY,
                dim=DIM,
                heads=HEADS,
                encoder_layers=1,
                decoder_layers=2,
                encoder_encoding="t5",
                decoder_encoding="t5",
                cross_encoding="rope",
            )
            return Transformer(config).double().eval()

    text = tokens(2 * PROCESSES)

    def forward(model: nn.Module, rows: slice) -> Tensor:
        logits: Tensor = model(text[rows], text[rows].flip(1))
        return logits

    _check(make, forward, rank)


def _check(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module, slice], Tensor], rank: int
) -> None:
    """Compare gradients of two processes with those of one.

    Args:
        make: creates the same model in every call.
        forward: its output for given rows of the batch.
    """
    half = slice(rank * 2, rank * 2 + 2)
    expected = _gradients(forward, make(), slice(None))
    data_parallel = DistributedDataParallel(make())
    for _ in range(2):  # a parameter without gradient stops the second step
        data_parallel.zero_grad()
        gradients = _gradients(forward, data_parallel, half)
    _compare("DistributedDataParallel", gradients, expected)
    sharded = make()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in [module for module in sharded.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    _compare("fully_shard", _gradients(forward, sharded, half), expected)


def _gradients(
    forward: Callable[[nn.Module, slice], Tensor], model: nn.Module, rows: slice
) -> dict[str, Tensor | None]:
    forward(model, rows).sin().mean().backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name.removeprefix("module.")] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
    return gradients


def _compare(
    label: str, gradients: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    if gradients.keys() != expected.keys():
        raise LawBroken(f"{label}: parameters differ from one process")
    for name, gradient in expected.items():
        got = gradients[name]
        if gradient is None:
            raise LawBroken(f"{label}: {name} has no gradient")
        if got is None:
            raise LawBroken(f"{label}: {name} has no gradient in two processes")
        agree(f"{label}: the gradient of {name}", got, gradient, tolerance=1e-6)
