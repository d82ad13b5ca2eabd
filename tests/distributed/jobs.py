"""Jobs on several ranks beside those of ``equality``."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from examples.long_context.__main__ import options, train
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posenc import Attention, Cache, Grid, Layout, attend, create, distributed
from posenc.distributed.group import Group
from posenc.errors import DerivativeError, PosencError, RankError
from posenc.lab.training import Watch, fit
from posenc.lab.training.ranks import TrainingRanks
from tests.distributed.equality import LAYOUTS, LENGTH, SPLITS, encoding_of, tensors
from tests.lab.training.spread import Learning, build, plan


def place(group: dist.ProcessGroup, split: str) -> Tensor:
    """This rank's tokens."""
    return SPLITS[split](dist.get_world_size(group), dist.get_rank(group))


def dropped(group: dist.ProcessGroup, form: str, name: str, layout: str) -> tuple[Tensor, ...]:
    """Indices of this rank's tokens, its output and the gradients of q and k, under dropout."""
    torch.manual_seed(5)
    index = place(group, "balanced")
    q, k, v, _, direction = (x[:, :, index] for x in tensors(torch.float64))
    q.requires_grad_(), k.requires_grad_()
    output = distributed.attend(
        *(q, k, v, distributed.take(LAYOUTS[layout](), index), encoding_of(name, torch.float64)),
        mesh=group,
        causal=True,
        form=form,
        dropout=0.4,
    )
    output.backward(direction)  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert k.grad is not None
    return index, output.detach(), q.grad, k.grad


def second_derivative(group: dist.ProcessGroup, form: str) -> str:
    """The refusal of second derivatives of attention, beside a loss that has them."""
    index = place(group, "balanced")
    q, k, v = (x[:, :, index].requires_grad_() for x in tensors(torch.float64)[:3])
    layout = distributed.take(LAYOUTS["sequence"](), index)
    encoding = encoding_of("t5", torch.float64)
    output = distributed.attend(q, k, v, layout, encoding, mesh=group, causal=True, form=form)
    (first,) = torch.autograd.grad(output.sin().sum(), k, create_graph=True)
    try:
        torch.autograd.grad((first + k.square()).sum(), k)
    except DerivativeError as error:
        return str(error)
    return ""


def written_difference(group: dist.ProcessGroup, form: str) -> float:
    """How far attention is off after one rank wrote into its layout."""
    index = place(group, "contiguous")
    *operands, _, _ = tensors(torch.float32)
    whole = Layout.padded([LENGTH, LENGTH - 1])
    layout, encoding = distributed.take(whole, index), encoding_of("t5", torch.float32)
    found = torch.empty(())
    for hidden in (0, 5):
        assert whole.valid is not None
        assert layout.valid is not None
        middle = LENGTH // 2  # where the second of two ranks begins
        whole.valid[:, middle : middle + hidden] = False
        if int(index[0]) == middle:
            layout.valid[:, :hidden] = False
        parts = [x[:, :, index] for x in operands]
        found = distributed.attend(*parts, layout, encoding, mesh=group, causal=True, form=form)
    expected = attend(*operands, Grid.of(whole, causal=True), encoding)[:, :, index]
    return float((found - expected).abs().max())


def queries_difference(group: dist.ProcessGroup, name: str, form: str, *, most: int) -> float:
    """How far attention is off where queries are other tokens than a rank's keys.

    Args:
        most: of this rank's queries, so many are kept, from the last on.
    """
    index, of_keys = place(group, "balanced")[-most:], place(group, "contiguous")
    q, k, v, x, _ = tensors(torch.float64)
    encoding, sinks = encoding_of(name, torch.float64), torch.linspace(-1, 2, q.shape[1]).double()
    whole = encoding.observe(x[:, 0], LAYOUTS["sequence"]())
    expected = attend(q, k, v, Grid.of(whole, causal=True), encoding, sinks=sinks, softcap=3.0)
    found = distributed.attend(
        *(q[:, :, index], k[:, :, of_keys], v[:, :, of_keys]),
        *(distributed.take(whole, index), encoding),
        key_layout=distributed.take(whole, of_keys),
        mesh=group,
        causal=True,
        form=form,
        sinks=sinks,
        softcap=3.0,
    )
    return float((found - expected[:, :, index]).abs().max())


def holds_group(group: dist.ProcessGroup) -> bool:
    """Whether a group outlives its end: its threads would run while Python stops."""
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")  # on all ranks
    index = place(made, "contiguous")
    q, k, v = (x[:, :, index] for x in tensors(torch.float64)[:3])
    layout = distributed.take(LAYOUTS["sequence"](), index)
    distributed.attend(q, k, v, layout, encoding_of("t5", torch.float64), mesh=made, causal=True)
    reference = weakref.ref(made)
    dist.destroy_process_group(made)
    del made
    gc.collect()
    return reference() is not None


def positions_gradient(group: dist.ProcessGroup, form: str) -> tuple[Tensor, Tensor]:
    """Indices of this rank's tokens, and the gradient of their positions, which are known."""
    index = place(group, "balanced")
    q, k, v, _, direction = (x[:, :, index] for x in tensors(torch.float64))
    times = torch.arange(LENGTH).double()[index].requires_grad_()
    layout = distributed.take(Layout.sequence(LENGTH), index).with_positions(times.view(1, -1, 1))
    encoding = encoding_of("rope", torch.float64)
    for placed in (layout.with_positions(layout.positions.detach()), layout):
        output = distributed.attend(q, k, v, placed, encoding, mesh=group, causal=True, form=form)
    output.backward(direction)  # type: ignore[no-untyped-call]
    assert times.grad is not None
    return index, times.grad


def error(group: dist.ProcessGroup, name: str, form: str, *, other: str | None = None) -> str:
    """The message with which ``attend`` fails; the last rank uses the encoding ``other``."""
    index = place(group, "contiguous")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    encoding = encoding_of(other if other and last else name, torch.float32)
    q, k, v, *_ = (x[:, :, index] for x in tensors(torch.float32))
    layout = distributed.take(Layout.sequence(LENGTH), index)
    try:
        distributed.attend(q, k, v, layout, encoding, mesh=group, causal=True, form=form)
    except PosencError as failure:
        return str(failure)
    return ""


def other_scale(group: dist.ProcessGroup) -> str:
    """The message with which ``attend`` fails where the last rank has an earlier call's scale."""
    index, encoding = place(group, "contiguous"), encoding_of("alibi", torch.float32)
    q, k, v, *_ = (x[:, :, index] for x in tensors(torch.float32))
    layout = distributed.take(Layout.sequence(LENGTH), index)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    try:
        for scale in (0.25, 0.5, 0.25 if last else 0.3):
            distributed.attend(q, k, v, layout, encoding, mesh=group, causal=True, scale=scale)
    except PosencError as failure:
        return str(failure)
    return ""


def several_axes(group: dist.ProcessGroup) -> list[str]:
    """The messages with which a mesh of two axes is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "tokens"))
    messages = []
    for refuse in (Group.of, TrainingRanks):
        try:
            refuse(mesh)
        except PosencError as failure:
            messages.append(str(failure))
    return messages


def explanation(group: dist.ProcessGroup, name: str) -> str:
    """The form that ``auto`` takes."""
    index = place(group, "contiguous")
    encoding = encoding_of(name, torch.float32)
    q, k, v, x, _ = (x[:, :, index] for x in tensors(torch.float32))
    layout = encoding.observe(x[:, 0], distributed.take(Layout.sequence(LENGTH), index))
    grid = Grid.of(layout, causal=True)
    return str(distributed.ContextParallel(group).explain(q, k, v, grid, encoding))


def cached(group: dist.ProcessGroup) -> str:
    """The message with which a layer over ranks refuses a cache."""
    layer = Attention(dim=24, heads=4, encoding=create("rope", head_dim=6), causal=True)
    distributed.parallelize(layer, group)
    try:
        layer(torch.zeros(1, 3, 24), Layout.sequence(3), cache=Cache(1)[0])
    except PosencError as failure:
        return str(failure)
    return ""


def dying(of: str, rank: int, ranks: int, store: str, results: Any) -> None:
    """The last of several processes is killed; the others send their errors.

    Args:
        of: ``"attention"``, killed before its call, or ``"training"``, killed in its third step.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    group = dist.new_group(timeout=timedelta(seconds=4))
    dist.barrier(group)

    def reached(step: int) -> None:
        if step == 3 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if of == "attention":
            reached(3)
            q = torch.zeros(1, 2, 3, 4)
            layout = Layout.sequence(3, 3 * rank)
            distributed.attend(q, q, q, layout, create("nope"), mesh=group)
        else:
            watch = Watch(stepped=lambda step, loss, speed: reached(step))
            mesh = DeviceMesh.from_group(group, "cpu")
            fit(build("decoder"), Learning("decoder"), plan("decoder", 6), watch, mesh=mesh)
    except RankError as failure:
        results.put((of, rank, str(failure)))
        os._exit(0)
    os._exit(2)


def long_context(group: dist.ProcessGroup, arguments: list[str]) -> list[float]:
    """Losses of the example."""
    return train(DeviceMesh.from_group(group, "cpu"), options(arguments))
