"""Differentiable collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.distributed.group import Group
from posenc.encoding.derivatives import differentiable_once

first_derivative = differentiable_once(
    "collectives", "Attend in one process, by posenc.attend, for second derivatives."
)
"""Decorator of backward passes, whose collectives autograd does not record."""


def gather(
    group: Group,
    lengths: Sequence[int],
    tensors: Sequence[Tensor],
    arrangement: Int[Tensor, " K"] | None = None,
) -> tuple[Tensor, ...]:
    """Tensors ``[L, …]`` of all ranks, concatenated; their gradients are summed and scattered.

    All go through one node of the graph, so that every rank calls the collectives of the backward
    pass in the same order.

    Args:
        arrangement: index by which the rows of all ranks are reordered.
    """
    gathered: tuple[Tensor, ...] = _Gather.apply(group, tuple(lengths), arrangement, *tensors)
    return gathered


def beginnings(x: Float[Tensor, "B H K D"], lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The first tokens of ``x``, in several lengths, of which the last is all of them.

    Their gradients are summed in that of the last, without a copy of ``x`` for each.
    """
    parts: tuple[Tensor, ...] = _Beginnings.apply(x, tuple(lengths))
    return parts


def exchange(group: Group, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
    """``Group.exchange``, whose gradient goes back where the rows came from."""
    received: Tensor = _Exchange.apply(group, x, tuple(sends), tuple(receives))
    return received


def total(group: Group, x: Tensor) -> Tensor:
    """The sum of all ranks' tensors; its gradient is the sum of theirs."""
    summed: Tensor = _Total.apply(group, x)
    return summed


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Any:
        ctx.group = group
        return group.sum(x.clone())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.group.sum(gradient.clone(memory_format=torch.contiguous_format))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        lengths: tuple[int, ...],
        arrangement: Tensor | None,
        *tensors: Tensor,
    ) -> Any:
        ctx.group, ctx.lengths = group, lengths
        ctx.inverse = None if arrangement is None else arrangement.argsort()
        return tuple(_arranged(group.gather(x, lengths), arrangement) for x in tensors)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        restored = (_arranged(g, ctx.inverse) for g in gradients)  # one at a time
        return None, None, None, *(ctx.group.reduce_scatter(g, ctx.lengths) for g in restored)


def _arranged(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


class _Beginnings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: tuple[int, ...]) -> Any:
        return tuple(x[:, :, :length] for length in lengths)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *parts, total = gradients
        if total.untyped_storage().nbytes() < total.nbytes:  # expanded
            total = total.clone()
        for chunk in parts:
            total[:, :, : chunk.shape[2]].add_(chunk)
        return total, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, x: Tensor, sends: tuple[int, ...], receives: tuple[int, ...]
    ) -> Any:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return group.exchange(x, sends, receives)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.group.exchange(gradient, ctx.receives, ctx.sends), None, None
