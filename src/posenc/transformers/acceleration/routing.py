"""Choice of the code that computes a call of the attention interface, and a record of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention.dispatch import query_kernel
from posenc.grid import FARTHEST, Grid
from posenc.transformers.acceleration.dense import dense_attention

POSENC, ORIGINAL = "posenc", "its own"

MOVED = "stretched, at all lengths"
"""The reason of calls that posenc computes since ``stretch`` moved their positions."""

Record = list[tuple[nn.Module, str, str]]
"""Modules in the order of their calls, with what computed them and the reason."""

_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded() -> Iterator[Record]:
    """A record of the calls in a context."""
    calls: Record = []
    token = _RECORD.set(calls)
    try:
        yield calls
    finally:
        _RECORD.reset(token)


def note(module: nn.Module, computed_by: str, reason: str) -> None:
    """Add a call to the record, if there is one."""
    if not torch.compiler.is_compiling() and (calls := _RECORD.get()) is not None:
        calls.append((module, computed_by, reason))


def note_kernel(module: nn.Module, grid: Grid, changes: Sequence[str]) -> None:
    """Add a call that posenc computes; without its padding it may be one that it need not."""
    unrestricted = (
        grid.key.document is None and grid.intervals is None and grid.band[0] == -FARTHEST
    )
    if (
        unrestricted
        and grid.band[1] in (0, FARTHEST)
        and not changes
        and grid.key.valid is not None
    ):
        pairs = describe(grid)
        note(module, ORIGINAL, f"{pairs}, where PyTorch's kernel is as fast; posenc with padding")
    else:
        note(module, POSENC, " with ".join([describe(grid), *changes]))


def describe(grid: Grid) -> str:
    """The pairs of a grid in a few words."""
    lowest, highest = grid.band
    if grid.intervals is not None:
        pairs = "an interval of keys for each query"
    elif lowest > -FARTHEST and highest < FARTHEST:
        pairs = f"a window from {lowest} to {highest}"
    elif lowest > -FARTHEST or highest not in (0, FARTHEST):
        pairs = f"keys from {lowest} on" if lowest > -FARTHEST else f"keys up to {highest}"
    else:
        pairs = "causal" if highest == 0 else "all keys"
    return pairs + (", packed" if grid.query.document is not None else "")


def plain_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    grid: Grid,
    *,
    dropout: float,
    scale: float | None,
) -> Float[Tensor, "B H Q E"] | None:
    """PyTorch's attention to all keys, the causal ones, or those of one query; None elsewhere.

    There its kernel needs no mask of all pairs, and little is gained by another but for one query.
    """
    attend = partial(_attend_all, dropout=dropout, scale=scale)
    if grid.dense:
        return attend(query, key, value, None)
    if grid.band == (-FARTHEST, 0) and grid.shift == 0 and not grid.segmented:
        return attend(query, key, value, None, causal=True)
    plain = grid.intervals is None and grid.key.document is None and grid.shift is not None
    if not plain or query.shape[2] > 1 or query.shape[0] != key.shape[0]:
        return None
    assert grid.shift is not None
    keys = key.shape[2]
    begin, end = (min(max(0, x - grid.shift), keys) for x in (grid.band[0], grid.band[1] + 1))
    valid = grid.key.valid
    mask = None if valid is None else valid[:, None, None, begin:end]
    if begin >= end:
        return None
    return attend(query, key[:, :, begin:end], value[:, :, begin:end], mask)


def _attend_all(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    mask: Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    causal: bool = False,
) -> Float[Tensor, "B H Q E"]:
    """Attention by PyTorch's kernel, or for one query by a faster one if there is one."""
    if query.shape[2] == 1 and mask is None and not dropout:
        kernel = query_kernel(query, key, value, plain=True)
        if kernel is not None:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            return kernel(query, key, value, None, scale=scale, sinks=None, softcap=None)
    return dense_attention(
        *(query, key, value, None, mask), dropout=dropout, scale=scale, causal=causal
    )[0]
