"""Token vectors, and logits by the same vectors."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["TokenEmbedding", "tied_logits"]


class TokenEmbedding(nn.Embedding):
    """Vectors E of token ids; of token vectors x, the products ``E x`` with all of them.

    Both are calls, so that hooks that bring or gather the weight run for either.
    """

    def forward(self, x: Int[Tensor, "*places"] | Float[Tensor, "*places C"]) -> Tensor:
        """``[..., C]`` for ids, ``[..., V]`` for vectors."""
        if x.is_floating_point():
            return nn.functional.linear(x, self.weight)
        return super().forward(x)


def tied_logits(
    embedding: nn.Module, x: Float[Tensor, "*places C"], count: int
) -> Float[Tensor, "*places V"]:
    """``E x``, E the vectors of ``embedding``, whatever was put in the place of the model's own.

    Args:
        embedding: a ``TokenEmbedding``, or a module of another kind (an adapter) that maps ids.
        x: ``[..., C]``.
        count: V, how many ids there are.
    """
    if isinstance(embedding, TokenEmbedding):
        logits: Tensor = embedding(x)
        return logits
    return nn.functional.linear(x, embedding(torch.arange(count, device=x.device)))
