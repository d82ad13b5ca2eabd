"""Token embedding, also used as output layer."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError


class TokenEmbedding(nn.Embedding):
    """Embedding E of token ids; for vectors x, the logits ``E x``.

    Both are calls of the module, so hooks that gather or load the weight run for either.
    """

    def forward(self, x: Int[Tensor, "*places"] | Float[Tensor, "*places C"]) -> Tensor:
        """``[..., C]`` for ids, ``[..., V]`` for vectors."""
        if x.is_floating_point():
            return nn.functional.linear(x, self.weight)
        try:
            return super().forward(x)
        except IndexError as error:
            raise ArgumentError(
                "tokens",
                expected=f"ids from 0 to {self.num_embeddings - 1}",
                got=f"{int(x.min())} to {int(x.max())}",
                remedy="Use the tokenizer of the model; padding too takes an id.",
            ) from error


def tied_logits(
    embedding: nn.Module, x: Float[Tensor, "*places C"], count: int
) -> Float[Tensor, "*places V"]:
    """Logits ``E x``, E the vectors of ``embedding``.

    Args:
        embedding: a ``TokenEmbedding``, or a module of another kind (an adapter) that maps ids.
        x: ``[..., C]``.
        count: V, the number of ids.
    """
    if isinstance(embedding, TokenEmbedding):
        logits: Tensor = embedding(x)
        return logits
    return nn.functional.linear(x, embedding(torch.arange(count, device=x.device)))
