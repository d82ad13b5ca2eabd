"""Attention of one new token to its cached past; terms by offset are read once for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.attention.api import transformed
from posenc.attention.backends.common.fused import fused_attention
from posenc.attention.cache import LayerCache
from posenc.attention.call import Call
from posenc.attention.dispatch import query_kernel, rotate
from posenc.attention.problem.lowering import lower
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import BucketedTerms, Encoding, Rotation
from posenc.encoding.prepared import active, are_known, reused, tensors_of
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import is_transformed

LEAST = 256
"""Offsets read at least."""


AHEAD = 64
"""Tokens whose rotations are computed at once where they come one by one."""


def may_keep_transformed(encoding: Encoding, cache: LayerCache, *, causal: bool) -> bool:
    """True if transformed keys are cached or can be: each depends on its position alone.

    A transform with parameters may change between calls, and where queries see both sides it may
    read all keys; then, and where more or wider keys would have to be kept, they are transformed at
    each call.
    """
    if cache.length:
        return cache.transformed
    transform = encoding.query_key
    if transform is None or not (causal and transform.tokenwise):
        return False
    return next(transform.parameters(), None) is None


def transform_tokens(call: Call) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "b g K D"]]:
    """Queries and keys after the query_key part, their rotation computed once a model."""
    transform = call.encoding.query_key
    if transform is None or torch.is_autocast_enabled(call.q.device.type):
        return transformed(call)
    if transform.axes is not None and call.grid.query.axes not in transform.axes:
        return transformed(call)  # which refuses them
    rotation = rotation_of(call)
    if rotation is None or rotation.has_gradient:
        return transformed(call)
    return rotate(rotation, call.q, call.k)


def rotation_of(call: Call) -> Rotation | None:
    """The rotation of new tokens, each by its position alone; None if the part has none.

    That of one token of a plain sequence is a row of those of ``AHEAD`` tokens.
    """
    transform, layout, grid = call.encoding.query_key, call.grid.query, call.grid
    assert transform is not None
    alone = layout.length == 1 and grid.key is layout and _ends_with(layout, layout)
    if active() is None or not alone or layout.positions.dtype != torch.float32:
        return call.rotation()
    index = layout.start % AHEAD  # type: ignore[operator]
    start = layout.start - index  # type: ignore[operator]

    def read() -> Rotation | None:
        q, k = (x.expand(-1, -1, AHEAD, -1) for x in (call.q, call.k))
        ahead = Layout.sequence(AHEAD, start, device=call.q.device)
        return transform.lower(q, k, Grid(ahead, ahead, grid.causal))

    kind = (start, grid.causal, call.q.dtype, call.q.device, call.q.shape, call.k.shape)
    rotation = reused(read, "rotations ahead", *kind, layers=(transform,))
    if rotation is None or rotation.query is not rotation.key:
        return call.rotation()
    cosine, sine = (factor[:, :, index : index + 1] for factor in rotation.query)
    factors = (cosine, sine)
    return Rotation(factors, factors, rotation.pairing)


def attend_last(call: Call) -> Float[Tensor, "B H 1 E"] | None:
    """``attend`` for the last token of a plain sequence; None where it is not served here.

    Served are calls without gradients on the CPU, of encodings without a query_key part whose
    other parts have tables, terms that read the query, and values by offset alone. The cache keeps
    the terms.
    """
    q, k, v, sinks, softcap = call.q, call.k, call.v, call.sinks, call.softcap
    plain, scale = sinks is None and softcap is None, call.logit_scale()
    terms = _served(call)
    if terms is None:
        return None
    begin = _size(call) - k.shape[2]
    bias = None if terms.bias is None else terms.bias[:, begin:].unsqueeze(1)  # [h, 1, K]
    if terms.buckets:
        read = _read_query(terms, call, begin)
        if read is None:
            return None
        bias = read if bias is None else bias + read
    kernel = None if terms.values else query_kernel(q, k, v, plain=plain)
    mask = None if bias is None else bias.view(-1, *bias.shape[-3:])
    if kernel is not None:
        return kernel(q, k, v, mask, scale=scale, sinks=sinks, softcap=softcap)
    if plain and not terms.values:
        return fused_attention(q, k, v, mask, scale=scale)
    if not plain and q.dtype.itemsize == 2:
        return None
    # Heads that share keys are queries of one product.
    logits = ((q * scale).view(*k.shape[:2], -1, q.shape[3]) @ k.mT).view(*q.shape[:3], -1)
    logits = logits if bias is None else logits + bias  # [B, H, 1, K]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = softmax_with_sinks(logits, None, sinks).to(v.dtype)
    output = (weights.view(*v.shape[:2], -1, v.shape[2]) @ v).view(*q.shape[:3], -1)
    for rows, bucket in terms.values:
        sums = weights.new_zeros(*weights.shape[:3], rows.shape[1])
        output = output + sums.index_add_(3, bucket[begin:], weights) @ rows.to(v.dtype)
    return output


def _served(call: Call) -> PastTerms | None:
    """The terms of a call that ``attend_last`` serves; None for others."""
    q, grid, encoding, keys = call.q, call.grid, call.encoding, call.k.shape[2]
    if q.shape[2] != 1 or keys == 1 or q.device.type != "cpu" or torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling() or is_transformed() or torch.is_autocast_enabled("cpu"):
        return None
    if encoding.query_key is not None:  # the cached keys have yet to be transformed
        return None
    if 1 - grid.band[0] < keys or not _ends_with(grid.key, grid.query):
        return None
    parts = [part for part in (encoding.score, encoding.value) if part is not None]
    modules = [module for part in parts for module in part.modules()]
    if not are_known(modules) or any(x.device.type != "cpu" for x in tensors_of(modules)):
        return None
    size, scale = _size(call), call.logit_scale()
    kind = (size, scale, q.dtype, q.shape, call.v.shape[3])
    read = partial(read_terms, encoding, q, call.v, size, scale)
    return reused(read, "past terms", *kind, layers=parts)


def _size(call: Call) -> int:
    """Offsets that terms are read at: a power of two, so that few tokens read them."""
    return max(LEAST, 1 << (call.k.shape[2] - 1).bit_length())


def _ends_with(past: Layout, last: Layout) -> bool:
    """True if both are plain sequences and the query is the last token of the past."""
    plain = all(
        side.start is not None
        and side.document is None
        and side.valid is None
        and side.special is None
        and side.signal is None
        for side in (past, last)
    )
    return plain and last.start == past.start + past.length - 1  # type: ignore[operator]


def _read_query(terms: PastTerms, call: Call, begin: int) -> Float[Tensor, "B H 1 K"] | None:
    """The terms that read the query; None where their buckets are numbered by the call."""
    score, q = call.encoding.score, call.q
    assert score is not None  # it has terms
    lowered = score.lower(q, call.k, call.grid, scale=call.logit_scale())
    if lowered is None or len(lowered) != len(terms.buckets):
        return None
    total: Tensor | None = None
    for term, (function, bucket) in zip(lowered, terms.buckets, strict=True):
        if not isinstance(term, BucketedTerms) or term.left is None or term.bucket != function:
            return None
        products = term.left.tokens @ term.left.rows.transpose(1, 2).to(term.left.tokens.dtype)
        read = products[..., bucket[begin:]]
        total = read if total is None else total + read
    return total


@dataclass(frozen=True, eq=False)
class PastTerms:
    """The terms of an encoding at the offsets ``1 - N … 0``.

    Args:
        bias: ``[H|1, N]``, the sum of the tables.
        buckets: of each term that reads the query, with the function that numbered them.
        values: rows of the value part ``[H|1, M, E]``, and the bucket of each offset.
    """

    bias: Float[Tensor, "h N"] | None = None
    buckets: tuple[tuple[Callable[..., Tensor], Int[Tensor, " N"]], ...] = ()
    values: tuple[tuple[Float[Tensor, "h M E"], Int[Tensor, " N"]], ...] = ()


def read_terms(
    encoding: Encoding, q: Tensor, v: Tensor, size: int, scale: float
) -> PastTerms | None:
    """The terms for ``size`` keys; None where some are not by offset alone."""
    if encoding.score is None and encoding.value is None:
        return PastTerms()
    device = q.device
    grid = Grid(
        Layout.sequence(1, size - 1, device=device), Layout.sequence(size, device=device), True
    ).in_precision_of(q)
    k = q.new_zeros(1, 1, 1, q.shape[3]).expand(q.shape[0], q.shape[1], size, -1)
    try:
        terms = lower(encoding, q, k, grid, scale=scale, value_dim=v.shape[3])
    except ArgumentError:  # a table that ends before
        return None
    score = encoding.score
    if terms is None or (score is not None and score.reads_layout):
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    biases, buckets, values = [], [], []
    for term in terms:
        if not isinstance(term, BucketedTerms) or term.right is not None or term.column is not None:
            return None
        bucket = term.bucket(grid.float_offsets(device=device).unsqueeze(-1))
        if term.table is not None:
            biases.append(term.table.to(wide)[:, bucket])
        if term.left is not None:
            buckets.append((term.bucket, bucket))
        if term.value is not None:
            values.append((term.value, bucket))
    if biases and (buckets or not getattr(score, "by_position", False)):
        return None  # a table beside what the query reads may depend on it
    bias = torch.stack(biases).sum(0) if biases else None
    return PastTerms(bias, tuple(buckets), tuple(values))
