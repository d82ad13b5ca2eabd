"""Rotation of blocks of features by exponentials of matrices, a token and a block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from posenc import Layout


def exponential(matrix: Tensor) -> Tensor:
    """exp by its series, after halving the matrix often enough."""
    halvings = max(0, math.ceil(math.log2(matrix.abs().sum().item() + 1)) + 2)
    small, total = matrix / 2**halvings, torch.eye(len(matrix), dtype=torch.float64)
    power = total
    for n in range(1, 25):
        power = power @ small / n
        total = total + power
    for _ in range(halvings):
        total = total @ total
    return total


def turn_blocks_by_loops(
    x: Tensor, layout: Layout, block: int, algebra: Callable[[int, int, Tensor], Tensor]
) -> Tensor:
    """Every block times the exponential of ``algebra(head, block, position)``."""
    x = x.double().clone()
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():
        if layout.special is not None and layout.special[0, i]:
            continue
        at = layout.positions[min(b, layout.positions.shape[0] - 1), i].double()
        for n in range(x.shape[-1] // block):
            part = slice(n * block, (n + 1) * block)
            x[b, h, i, part] = exponential(algebra(h, n, at)) @ x[b, h, i, part]
    return x
