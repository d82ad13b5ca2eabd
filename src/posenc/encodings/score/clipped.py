"""Vectors by clipped offset, which Shaw's and the contextual method share."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError

__all__ = ["ClippedTable"]


class ClippedTable(nn.Module):
    """A trained vector for each clipped offset: ``rows`` is ``[2k + 1, D]``, Xavier-uniform.

    Args:
        head_dim: width D.
        max_distance: k, the offset beyond which all are alike.

    Raises:
        ArgumentError: when ``head_dim`` is below 1 or ``max_distance`` negative.
    """

    def __init__(self, *, head_dim: int, max_distance: int) -> None:
        super().__init__()
        if head_dim < 1:
            raise ArgumentError(
                "head_dim", expected="1 or more", got=head_dim, remedy="Use the attention's."
            )
        if max_distance < 0:
            raise ArgumentError(
                "max_distance", expected="0 or more", got=max_distance, remedy="Shaw's is 16."
            )
        self.max_distance = max_distance
        self.rows = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.xavier_uniform_(self.rows)

    def forward(self) -> Float[Tensor, "N D"]:
        """The rows."""
        return self.rows

    def bucket(self, offset: Float[Tensor, "*dims A"]) -> Int[Tensor, "*dims"]:
        """Row of each offset Δ ``[..., 1]``: ``clip(round(Δ), -k, k) + k``."""
        clipped = offset[..., 0].round().clamp(-self.max_distance, self.max_distance)
        return clipped.long() + self.max_distance
