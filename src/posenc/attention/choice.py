"""Which backend ``auto`` takes: the rules, and what they were measured to be worth.

Measured on two CPU cores in float32, 8 heads of 64, by ``posenc bench --backends sdpa,tiled``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from posenc.attention.backends.base import Problem
from posenc.encoding import LowRank
from posenc.runtime import is_transformed

__all__ = ["preference"]

SMALL = 2**20
"""Logits in all up to which the definition costs less than tiles do; 4 MiB in float32."""

LONG = 8192
"""Keys from which on a table is worth looking at for pairs that cannot matter."""


def preference(device: torch.device, pose: Callable[[], Problem]) -> tuple[str, list[str]]:
    """A reason, and the names of the backends in the order to be tried.

    Args:
        device: where the tensors are.
        pose: the problem with queries and keys transformed, which is asked for only where the
            rules look at it.
    """
    if device.type != "cpu":
        # Kernels of our own wait behind until they have been measured on a device.
        return "on an accelerator", ["sdpa", "tiled", "triton", "flex", "reference"]
    if torch.compiler.is_exporting():
        # A rule that reads sizes would fix them; other runtimes know no operators of ours.
        return "exporting", ["sdpa", "reference"]
    problem = pose()
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    if batch * heads * queries * keys <= SMALL:
        if is_transformed():  # vmap would call the fused kernel in a loop, with a warning
            return "few logits, under a transform of torch.func", ["reference"]
        return "few logits", ["sdpa", "reference"]
    lowered = problem.lowered or ()
    if problem.grid.marked:
        return "documents or padding in a large problem", ["tiled", "sdpa", "reference"]
    ranks = sum(term.query.shape[-1] for term in lowered if isinstance(term, LowRank))
    if ranks > problem.q.shape[-1]:
        return "more extra columns than features", ["tiled", "sdpa", "reference"]
    if keys >= LONG and any(not isinstance(term, LowRank) for term in lowered):
        return "a long table, which may fade out", ["tiled", "sdpa", "reference"]
    return "many logits", ["sdpa", "tiled", "reference"]
