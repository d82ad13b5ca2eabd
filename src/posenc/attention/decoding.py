"""Attention of one new token to its cached past; terms by offset are read once for many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.fused import fused_attention
from posenc.attention.cache import LayerCache
from posenc.attention.call import Call
from posenc.attention.dispatch import query_kernel
from posenc.attention.past_terms import PastTerms, read_terms
from posenc.attention.softmax import softmax_with_sinks
from posenc.encoding import BucketedTerms, QueryKeyTransform, Rotation
from posenc.encoding.reuse import ModuleStates
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.runtime import has_values, is_transformed, needs_dispatch

LEAST = 256
"""Offsets read at first, doubled whenever the past is longer."""


AHEAD = 64
"""Tokens whose rotations are computed at once where they come one by one."""


@dataclass(frozen=True, eq=False)
class RotationsAhead:
    """The rotations of ``AHEAD`` tokens of a plain sequence.

    Args:
        start: position of the first, which is exact in float32 like all of them.
        states: of the query_key part.
        rotation: of queries and keys alike; None if the part has none, or may change unnoticed.
    """

    start: int
    states: ModuleStates
    rotation: Rotation | None

    def serves(self, transform: QueryKeyTransform, start: int) -> bool:
        """True if the rotations are valid for the part at this position."""
        return self.start == start and self.states.root() is transform and self.states.hold()


def rotation_of(call: Call, cache: LayerCache) -> Rotation | None:
    """The rotation of new tokens, each by its position alone; None if the part has none.

    That of one token of a plain sequence is a row of those of ``AHEAD`` tokens.
    """
    transform, layout, grid = call.encoding.query_key, call.grid.query, call.grid
    assert transform is not None
    alone = layout.length == 1 and grid.key is layout and _ends_with(layout, layout)
    alone = alone and layout.positions.dtype == torch.float32
    if not alone or not has_values(call.q) or is_transformed() or needs_dispatch(call.q, call.k):
        return transform.lower(call.q, call.k, grid)
    index = layout.start % AHEAD  # type: ignore[operator]
    start = layout.start - index  # type: ignore[operator]

    def read() -> RotationsAhead:
        states, rotation = ModuleStates(transform), None
        q, k = (x.expand(-1, -1, AHEAD, -1) for x in (call.q, call.k))
        ahead = Layout.sequence(AHEAD, start, device=call.q.device)
        if states.complete:
            with torch.inference_mode(False), torch.no_grad():
                rotation = transform.lower(q, k, Grid(ahead, ahead, grid.causal))
        return RotationsAhead(start, states, rotation)

    ahead = cache.shared.renewed("rotations", lambda x: x.serves(transform, start), read)
    rotation = ahead.rotation
    if rotation is None or rotation.query is not rotation.key:
        return transform.lower(call.q, call.k, grid)
    cosine, sine = (factor[:, :, index : index + 1] for factor in rotation.query)
    factors = (cosine, sine)
    return Rotation(factors, factors, rotation.pairing)


def attend_last(call: Call, cache: LayerCache) -> Float[Tensor, "B H 1 E"] | None:
    """``attend`` for the last token of a plain sequence; None where it is not served here.

    Served are calls without gradients on the CPU, of encodings without a query_key part whose
    other parts have tables, terms that read the query, and values by offset alone. The cache keeps
    the terms.
    """
    q, k, v, sinks, softcap = call.q, call.k, call.v, call.sinks, call.softcap
    plain, scale = sinks is None and softcap is None, call.logit_scale()
    terms = _served(call, cache)
    if isinstance(terms, str):
        return None
    keys = k.shape[2]
    begin = terms.size - keys
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


def refusal_of_last(call: Call, cache: LayerCache) -> str | None:
    """Reason for which ``attend_last`` returns None, to end a sentence; None if it serves."""
    terms, dtype = _served(call, cache), call.q.dtype
    if isinstance(terms, str):
        return terms
    plain = call.sinks is None and call.softcap is None
    by_products = terms.values or query_kernel(call.q, call.k, call.v, plain=plain) is None
    if dtype.itemsize == 2 and not plain and by_products:
        return f"logits would be rounded to {dtype} before the cap or beside the sinks"
    if terms.buckets and _read_query(terms, call, terms.size - call.k.shape[2]) is None:
        return "the encoding numbers its buckets anew in every call"
    return None


def _served(call: Call, cache: LayerCache) -> PastTerms | str:
    """The terms of a call that ``attend_last`` serves, or the reason why it does not."""
    q, grid, encoding, keys = call.q, call.grid, call.encoding, call.k.shape[2]
    if q.shape[2] != 1 or keys == 1:
        return "the call is not one token after others"
    if q.device.type != "cpu":
        return "the tensors are not on a CPU"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if torch.compiler.is_compiling() or is_transformed() or torch.is_autocast_enabled("cpu"):
        return "the call is compiled, transformed or under autocast"
    if encoding.query_key is not None:
        return "the cached keys have yet to be transformed"
    if 1 - grid.band[0] < keys:
        return "a window hides some of the past"
    sides = (grid.query, grid.key)
    if not cache.shared.get("last", sides, lambda: _ends_with(grid.key, grid.query)):
        return "the past and the token are not one plain sequence"
    if encoding.score is None and encoding.value is None:
        return PastTerms(encoding, keys, None, None)
    scale = call.logit_scale()
    if cache.terms is None or not cache.terms.holds(encoding, keys, (scale, q.dtype)):
        cache.terms = read_terms(encoding, q, call.v, max(LEAST, 2 * keys), scale)
    if not cache.terms.served:
        return "the encoding has terms that are not by offset alone"
    return cache.terms


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
    score, q = terms.encoding.score, call.q
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
