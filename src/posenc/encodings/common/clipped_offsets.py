"""Tables indexed by clipped offset, used by ``shaw`` and ``contextual``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Natural, Width, checked
from posenc.encoding.tensors import BucketIndex, Offsets


class ClippedTable(nn.Module):
    """A trained vector for each clipped offset: ``rows`` is ``[2k + 1, D]``, Xavier-uniform.

    Args:
        head_dim: width D.
        max_distance: k; larger offsets share the last row on their side.

    Raises:
        ArgumentError: when ``head_dim`` is below 1 or ``max_distance`` negative.
    """

    @checked
    def __init__(self, *, head_dim: Width, max_distance: Natural) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.rows = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.xavier_uniform_(self.rows)

    def forward(self) -> Float[Tensor, "N D"]:
        """The rows."""
        return self.rows

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Row of each offset Δ ``[..., 1]``: ``clip(round(Δ), -k, k) + k``."""
        return clipped_bucket(offset, self.max_distance)


def clipped_bucket(offset: Offsets, limit: int) -> BucketIndex:
    """``clip(round(Δ), -limit, limit) + limit`` of each offset Δ ``[..., 1]``."""
    return offset[..., 0].round().clamp(-limit, limit).long() + limit
