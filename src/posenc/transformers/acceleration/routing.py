"""Choice of the code that computes a call, a record of it, and attention to all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from posenc.attention.backends.common.fused import fused_attention
from posenc.attention.dispatch import query_kernel
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import repeat_heads
from posenc.encoding.derivatives import with_definition
from posenc.grid import FARTHEST, Grid
from posenc.runtime import is_exporting
from posenc.transformers.acceleration.accelerated import SHORTEST
from posenc.transformers.acceleration.masks import seen_by_one

LARGE = 2**21
"""Logits of a batch whose windows, and causal rows, of 128 keys took 0.6 to 0.8 of PyTorch's time;
of 64 keys they took more."""

FEW = 2**16
"""Numbers of keys below which one query's call costs more while a model decodes than it saves."""

POSENC, ORIGINAL = "posenc", "its own"

AS_FAST = "where PyTorch's kernel is as fast"

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


def note(module: nn.Module, computed_by: str, reason: Callable[[], str]) -> None:
    """Add a call to the record, if there is one."""
    if not torch.compiler.is_compiling() and (calls := _RECORD.get()) is not None:
        calls.append((module, computed_by, reason()))


def note_plain(module: nn.Module, grid: Grid) -> None:
    """Add a call that PyTorch's kernel computes."""
    note(module, ORIGINAL, lambda: f"{describe(grid)}, {AS_FAST}")


def note_kernel(module: nn.Module, grid: Grid, changes: Sequence[str]) -> None:
    """Add a call that posenc computes."""
    note(module, POSENC, lambda: " with ".join([describe(grid), *changes]))


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


def are_enough(query: Float[Tensor, "B H Q D"], grid: Grid, shortest: int) -> bool:
    """True where posenc computes a call: from ``shortest`` keys on.

    By default from half as many on in batches of ``LARGE``, where rows are not padded.
    """
    keys = grid.key.length
    if keys >= shortest:
        return True
    if shortest != SHORTEST or keys < SHORTEST // 2 or torch.compiler.is_compiling():
        return False
    return query.numel() // query.shape[-1] * keys >= LARGE and grid.key.valid is None


def may_gain(query: Float[Tensor, "B H Q D"]) -> bool:
    """True where ``attend`` may have a faster kernel than PyTorch for all keys, or the causal ones.

    Its kernels on CPUs skip what is masked, and are ahead in bfloat16 (``posenc.attention``'s rules
    say where). PyTorch's is part of graphs, and hard to beat on other devices.
    """
    return query.is_cpu and not torch.compiler.is_compiling()


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

    There its kernel needs no mask of all pairs.
    """
    attend = partial(attend_all, dropout=dropout, scale=scale)
    if grid.dense:
        return attend(query, key, value, None)
    if grid.band == (-FARTHEST, 0) and grid.shift == 0 and not grid.segmented:
        return attend(query, key, value, None, causal=True)
    if query.shape[2] > 1 or query.shape[0] != key.shape[0]:
        return None
    seen = seen_by_one(grid)
    if seen is None:
        return None
    begin, end, _ = seen
    valid = grid.key.valid
    mask = None if valid is None else valid[:, None, None, begin:end]
    return attend(query, key[:, :, begin:end], value[:, :, begin:end], mask)


def attend_all(
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
        kernel = None if key.numel() < FEW else query_kernel(query, key, value, plain=True)
        if kernel is not None:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            return kernel(query, key, value, None, scale=scale, sinks=None, softcap=None)
        if not torch.is_grad_enabled():
            return fused_attention(query, key, value, scale=scale)
    return dense_attention(
        *(query, key, value, None, mask), dropout=dropout, scale=scale, causal=causal
    )[0]


def dense_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K E"],
    bias: Float[Tensor, "B H Q K"] | None,
    mask: Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    with_weights: bool = False,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H Q E"], Float[Tensor, "B H Q K"] | None]:
    """PyTorch's attention with a bias written out; with weights, attention by its definition.

    So too in exported programs that train the bias: to ONNX, those with PyTorch's kernel fail.

    Args:
        causal: a query attends to keys up to its own index; only without a mask and a bias.
        softcap, sinks: as of ``attend``.
    """
    exported = is_exporting() and bias is not None and bias.requires_grad
    if with_weights or exported or softcap is not None or sinks is not None:
        if causal:
            mask = _mask_of_causality(query, key)
        logits = logits_of(query, key, bias, scale)
        output, weights = attend_by_logits(
            logits, value, mask, dropout=dropout, softcap=softcap, sinks=sinks
        )
        return output, weights if with_weights else None
    if bias is not None and mask is not None:
        boolean = mask.dtype == torch.bool
        lowest = torch.finfo(bias.dtype).min
        mask = bias.masked_fill(~mask, lowest) if boolean else bias + mask
    elif bias is not None:
        mask = bias
    output = fused_attention(query, key, value, mask, causal=causal, dropout=dropout, scale=scale)
    if dropout:  # of which the definition would draw another mask
        return output, None

    def definition(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        visible = masks[0] if masks else _mask_of_causality(q, k) if causal else None
        return attend_by_logits(logits_of(q, k, None, scale), v, visible, dropout=0.0)[0]

    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    return with_definition((output,), definition, tensors)[0], None


def _mask_of_causality(query: Tensor, key: Tensor) -> Tensor:
    """True where the key's index is not above the query's, ``[1, 1, Q, K]``."""
    pairs = query.shape[2], key.shape[2]
    return torch.ones(pairs, dtype=torch.bool, device=query.device).tril()[None, None]


def logits_of(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    bias: Float[Tensor, "B H Q K"] | None,
    scale: float | None,
) -> Float[Tensor, "B H Q K"]:
    """Logits by their definition."""
    key = repeat_heads(key, query.shape[1])
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return logits if bias is None else logits + bias


def attend_by_logits(
    logits: Float[Tensor, "B H Q K"],
    value: Float[Tensor, "B G K D"],
    mask: Tensor | None,
    *,
    dropout: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q K"]]:
    """The output and the weights.

    Args:
        mask: True for keys that are seen, or added to the logits.
        softcap, sinks: as of ``attend``.
    """
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        logits, mask = logits + mask, None
    weights = drop(softmax_with_sinks(logits, mask, sinks).to(value.dtype), dropout)
    return weights @ repeat_heads(value, logits.shape[1]), weights
