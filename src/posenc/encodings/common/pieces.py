"""Functions of rows computed some rows at a time, and again for their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.runtime import without_autocast

ROWS = 1024
"""Rows that are computed at once."""


def by_pieces(
    compute: Callable[[Tensor], tuple[Tensor, ...]],
    x: Float[Tensor, "L C"],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """``compute(x)``, of which nothing but the results and ``x`` is kept for gradients.

    Args:
        compute: maps any rows of ``x`` to tensors of as many rows.
        x: the rows.
        parameters: other tensors that the results have gradients for.
    """
    return _Pieces.apply(compute, x, *parameters)  # type: ignore[no-any-return]


def _pieces(count: int) -> Iterator[slice]:
    return (slice(at, min(count, at + ROWS)) for at in range(0, count, ROWS))


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for piece in _pieces(len(x)):
            parts = compute(x[piece])
            outputs = outputs or [part.new_empty(len(x), *part.shape[1:]) for part in parts]
            for to, part in zip(outputs, parts, strict=True):
                to[piece] = part
        ctx.compute = compute
        ctx.save_for_backward(x, *parameters)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        dx, totals = torch.empty_like(x), [torch.zeros_like(parameter) for parameter in wanted]
        twice = torch.is_grad_enabled()
        for piece in _pieces(len(x)):
            rows = x[piece]
            if not (twice and x.requires_grad):
                rows = rows.detach().requires_grad_()
            with torch.enable_grad(), without_autocast(x.device):
                parts = ctx.compute(rows)
            dx[piece], *rest = torch.autograd.grad(
                parts,
                [rows, *wanted],
                [gradient[piece] for gradient in gradients],
                create_graph=twice,
                allow_unused=True,
                materialize_grads=True,
            )
            for total, part in zip(totals, rest, strict=True):
                total += part
        summed = iter(totals)
        return None, dx, *(next(summed) if p.requires_grad else None for p in parameters)
