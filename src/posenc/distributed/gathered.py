"""Forms in which a rank sees all tokens: all-gather of keys, and some heads of all (Ulysses)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.api import attend_block
from posenc.distributed.group import Group, beginnings, exchange, gather
from posenc.distributed.shards import Piece, ShardedCall, Shards, pieces
from posenc.encoding import repeat_heads
from posenc.layout import Layout


def attend_gathered(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries; gradients of keys and values go back to their ranks."""
    shards, local, grid = call.shards, call.local, call.local.grid
    tensors = [local.k.permute(2, 0, 1, 3), local.v.permute(2, 0, 1, 3)]  # [L, B, G, D]
    if grid.key.signal is not None:
        tensors.append(grid.key.signal.transpose(0, 1))  # [L, B, S]
    k, v, *signals = gather(call.session.group, shards.lengths, tensors, shards.arrangement)
    key = shards.sorted
    if signals:
        key = replace(key, signal=signals[0].transpose(0, 1))
    query_pieces = pieces(grid.query)
    visible = _visible(call, query_pieces, key)
    outputs = []
    keys, values = (beginnings(x.permute(1, 2, 0, 3), visible) for x in (k, v))
    for piece, length, k, v in zip(query_pieces, visible, keys, values, strict=True):
        visible_key = key if length == key.length else key.slice(0, length)
        piece_grid = replace(grid, query=piece.with_signal(grid.query.signal), key=visible_key)
        piece_call = call.part(local.q[:, :, piece.tokens], k, v, piece_grid)
        outputs.append(attend_block(piece_call, call.backend)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _visible(call: ShardedCall, query_pieces: list[Piece], key: Layout) -> list[int]:
    """Number of sorted keys that each piece reads; the last reads all."""
    encoding = call.local.encoding
    parts = [part for part in encoding.parts() if part is not encoding.embedding]
    if not call.local.grid.causal or key.order.shape[0] > 1 or not all(x.pairwise for x in parts):
        return [key.length] * len(query_pieces)
    last = torch.tensor([piece.orders[1] for piece in query_pieces[:-1]], device=key.device)
    return [*torch.searchsorted(key.order[0], last, right=True).tolist(), key.length]


def heads_refusal(call: ShardedCall) -> str | None:
    """The reason why the heads of the call cannot be shared out."""
    heads, ranks = call.local.q.shape[1], call.session.group.size
    if heads % ranks:
        return f"{ranks} ranks do not divide its {heads} heads"
    for part in call.local.encoding.parts():
        views = getattr(part, "views", 1)
        if part.mixes_heads and ranks > 1:
            return f"{type(part).__name__} mixes heads"
        if heads // ranks % views:
            return f"{type(part).__name__} has {views} heads a query, of which a rank would get one"
    return None


def attend_by_heads(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries; other heads' and tokens' gradients go back alike."""
    group, local, grid = call.session.group, call.local, call.local.grid
    heads, groups = local.q.shape[1], math.lcm(local.k.shape[1], group.size)
    k, v = (repeat_heads(x, groups) for x in (local.k, local.v))
    of_keys, of_queries = call.shards, call.session.shards(grid.query)
    q = _to_heads(group, of_queries, local.q)
    k, v = (_to_heads(group, of_keys, x) for x in (k, v))
    query, key = (
        _full_layout(group, *side) for side in ((of_queries, grid.query), (of_keys, grid.key))
    )
    first, end = (rank * heads // group.size for rank in (group.rank, group.rank + 1))
    of_heads = call.part(
        *(q, k, v, replace(grid, query=query, key=key)),
        encoding=local.encoding.heads(first, end),
        scale=local.logit_scale(),
        sinks=None if local.sinks is None else local.sinks[first:end],
        first_head=first,
    )
    output, _ = attend_block(of_heads, call.backend)
    return _to_tokens(group, of_queries, output)


def _to_heads(group: Group, shards: Shards, x: Float[Tensor, "B H L D"]) -> Tensor:
    """This rank's heads of all tokens, ``[B, H / ranks, K, D]``, tokens sorted."""
    tokens = x.shape[2]
    batch, heads, _, width = x.shape
    parts = x.view(batch, group.size, heads // group.size, tokens, width)
    rows = parts.permute(1, 3, 0, 2, 4).flatten(0, 1)
    received = exchange(group, rows, [tokens] * group.size, shards.lengths)
    return shards.arrange(received).permute(1, 2, 0, 3)


def _to_tokens(group: Group, shards: Shards, x: Float[Tensor, "B H K D"]) -> Tensor:
    """All heads of this rank's tokens, ``[B, H · ranks, L, D]``."""
    count = shards.lengths[group.rank]
    rows = shards.restore(x.permute(2, 0, 1, 3))
    received = exchange(group, rows, shards.lengths, [count] * group.size)
    return (
        received.view(group.size, count, *received.shape[1:]).permute(2, 0, 3, 1, 4).flatten(1, 2)
    )


def _full_layout(group: Group, shards: Shards, layout: Layout) -> Layout:
    """The layout of all tokens, sorted, with their signals."""
    if layout.signal is None:
        return shards.sorted
    signals = [layout.signal.transpose(0, 1)]
    (signal,) = gather(group, shards.lengths, signals, shards.arrangement)
    return replace(shards.sorted, signal=signal.transpose(0, 1))
