"""The all-gather form: every rank attends from its own queries to the keys of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.api import attend_block
from posenc.attention.call import Call
from posenc.distributed.call import ShardedCall
from posenc.distributed.collectives import beginnings, gather
from posenc.distributed.shards import Piece, pieces
from posenc.grid import Grid
from posenc.layout import Layout


def attend_gathered(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries; gradients of keys and values go back to their ranks."""
    shards, grid = call.shards, call.grid
    tensors = [call.k.permute(2, 0, 1, 3), call.v.permute(2, 0, 1, 3)]  # [L, B, G, D]
    signal = grid.key.signal
    if signal is not None:
        tensors.append(signal.transpose(0, 1))  # [L, B, S]
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
        piece_call = Call(
            call.q[:, :, piece.begin : piece.end],
            k,
            v,
            Grid(piece.with_signal(grid.query.signal), visible_key, grid.causal, grid.window),
            call.encoding,
            scale=call.scale,
            counter_dropout=call.counter_dropout(piece.layout, visible_key),
            sinks=call.sinks,
            softcap=call.softcap,
        )
        outputs.append(attend_block(piece_call, call.backend)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _visible(call: ShardedCall, query_pieces: list[Piece], key: Layout) -> list[int]:
    """Number of sorted keys that each piece reads; the last reads all."""
    parts = [part for part in call.encoding.parts() if part is not call.encoding.embedding]
    if not call.grid.causal or key.order.shape[0] > 1 or not all(x.pairwise for x in parts):
        return [key.length] * len(query_pieces)
    last = torch.tensor([piece.orders[1] for piece in query_pieces[:-1]], device=key.device)
    return [*torch.searchsorted(key.order[0], last, right=True).tolist(), key.length]
