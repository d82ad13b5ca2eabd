"""Causal attention with ALiBi, a bias by key, as Bloom, Falcon and MPT compute it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posenc.encoding import BucketedTerms
from posenc.transformers.acceleration.accelerated import Accelerated
from posenc.transformers.acceleration.masks import grid_of


def attend_alibi(
    module: Accelerated,
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B G K D"],
    v: Float[Tensor, "B G K D"],
    bias: Float[Tensor, "b H K"],
    attended: Bool[Tensor, "B K"] | None,
    *,
    dropout: float,
    scale: float,
) -> Float[Tensor, "B Q C"]:
    """Attention of the last Q of K tokens, heads merged.

    Args:
        module: the layer; in evaluation mode nothing is dropped.
        bias: as the model made it: of a query's keys, only differences matter.
        attended: False for padding. A query that sees no key gets the mean of all values, as under
            a mask that adds the lowest number.
    """
    term = BucketedTerms(lambda offset: torch.zeros_like(offset[..., 0].long()), column=bias)
    grid = grid_of(q.shape[2], k.shape[2], attended, causal=True, device=q.device)
    output = module.attend(q, k, v, grid, term, dropout=dropout, scale=scale)
    if attended is not None:
        nonempty = attended.cumsum(1)[:, -q.shape[2] :] > 0
        output = torch.where(nonempty[:, None, :, None], output, v.mean(dim=2, keepdim=True))
    return output.transpose(1, 2).flatten(2)
