"""The all-gather form: every rank attends from its own queries to the keys of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.api import attend_block
from posenc.distributed.call import ShardedCall
from posenc.distributed.collectives import gather
from posenc.distributed.shards import pieces
from posenc.grid import Grid


def attend_gathered(call: ShardedCall) -> Float[Tensor, "B H L E"]:
    """Attention of this rank's queries; gradients of keys and values go back to their ranks."""
    shards = call.shards()
    tensors = [call.k.permute(2, 0, 1, 3), call.v.permute(2, 0, 1, 3)]  # [L, B, G, D]
    signal = call.grid.key.signal
    if signal is not None:
        tensors.append(signal.transpose(0, 1))  # [L, B, S]
    gathered = gather(call.session.group, shards.lengths, tensors)
    k, v = (shards.arrange(x).permute(1, 2, 0, 3) for x in gathered[:2])
    key = shards.sorted
    if signal is not None:
        key = replace(key, signal=shards.arrange(gathered[2]).transpose(0, 1))
    outputs = [
        attend_block(
            call.q[:, :, piece.begin : piece.end],
            k,
            v,
            Grid(
                piece.with_signal(call.grid.query.signal), key, call.grid.causal, call.grid.window
            ),
            call.encoding,
            backend=call.backend,
            scale=call.scale,
            dropout=call.keyed_dropout(piece.layout, key),
        )[0]
        for piece in pieces(call.grid.query)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
