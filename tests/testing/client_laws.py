"""Laws of whole models: adapters, offloading, quantisation and distributed training."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_all_start_methods
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from posenc.layout import Layout
from posenc.models import Decoder, DecoderConfig, Transformer, TransformerConfig, generate
from posenc.models.block import Block
from posenc.registry import ENCODINGS
from posenc.testing.subject import (
    DIM,
    HEAD_DIM,
    HEADS,
    LENGTH,
    LawBroken,
    Layer,
    Subject,
    agree,
    inputs,
    named,
    seeded,
    tokens_of,
)

VOCABULARY = 11


def stack(subject: Subject, *, tied: bool = True) -> Decoder:
    """A decoder of two blocks in float64, the same in every call."""
    records = subject.layers(2)
    with seeded(13):
        config = DecoderConfig(
            vocabulary=VOCABULARY, dim=DIM, layers=2, heads=HEADS, head_dim=HEAD_DIM, tied=tied
        )
        return Decoder(config, encodings=records).double().eval()


def tokens(rows: int = 2) -> Tensor:
    """Token ids ``[rows, 13]``."""
    return torch.arange(rows * LENGTH).reshape(rows, LENGTH) % VOCABULARY


def run(subject: Subject, model: nn.Module, text: Tensor | None = None) -> Tensor:
    """Logits of some tokens at positions that the encoding supports."""
    text = tokens() if text is None else text
    logits: Tensor = model(text, subject.place(Layout.sequence(LENGTH)))
    return logits


@named
def adapters_merge(subject: Subject) -> None:
    """LoRA adapters on every linear layer change the output, have gradients, and can be merged."""
    for merged in (False, True):
        layer = subject.layer(merged=merged)
        before = _output(subject, layer)
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        model = _adapted(layer, names)
        adapters = {n: p for n, p in model.named_parameters() if "lora_B" in n}
        total = _output(subject, model).sin().sum()
        gradients = torch.autograd.grad(total, list(adapters.values()), allow_unused=True)
        for name, gradient in zip(adapters, gradients, strict=True):
            if gradient is None:
                raise LawBroken(f"{name} has no gradient")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            for parameter in adapters.values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        adapted = _output(subject, model)
        if torch.allclose(adapted, before, atol=1e-4):
            raise LawBroken(f"adapters on {', '.join(names)} change nothing")
        unloaded = cast(Any, copy.deepcopy(model)).merge_and_unload()
        agree("the model with its adapters merged", _output(subject, unloaded), adapted)


@named
def offloading_changes_nothing(subject: Subject) -> None:
    """accelerate's CPU offloading does not change outputs or generated tokens.

    Of decoders with tied and untied output layers.
    """
    from accelerate import cpu_offload

    for tied in (True, False):
        model = stack(subject, tied=tied)
        with torch.no_grad():
            expected = run(subject, model)
            offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
            got = run(subject, offloaded)
        agree(f"the output, tied={tied}", got, expected)
        if subject.axes == 1 and tied:
            drawn = [
                generate(decoder, tokens(), max_new_tokens=3) for decoder in (offloaded, model)
            ]
            agree("the generated tokens", *drawn)


@named
def quantisation_is_near(subject: Subject) -> None:
    """``quantize_dynamic`` of all linear layers changes logits little."""
    from torch.ao.quantization import quantize_dynamic

    model = stack(subject).float()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
        expected = run(subject, model)
        quantised: Any = quantize_dynamic(model, dtype=torch.qint8)
        got = run(subject, quantised)
    agree("the output", got, expected, tolerance=0.2)


def _adapted(layer: Layer, names: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with seeded(5):
        config = LoraConfig(r=2, target_modules=names, bias="none")
        return get_peft_model(layer, config).double()


def _output(subject: Subject, model: nn.Module) -> Tensor:
    layout = subject.place(Layout.sequence(LENGTH))
    output: Tensor = model(inputs(), layout, tokens=tokens_of())
    return output


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
        start_processes(_work, arguments, PROCESSES, start_method=START)
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
    forward(model, rows).sin().mean().backward()
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
