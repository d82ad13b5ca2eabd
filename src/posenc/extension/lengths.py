"""Length of the row or document of each token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import documents_of, hidden_tokens


def seen_lengths(grid: Grid) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b k"]]:
    """Length of each query's and each key's row, as the largest key position + 1.

    Documents count separately; padding and special tokens do not count, future keys do.
    ``[B|1, Q|1]`` and ``[B|1, K|1]``; −∞ without keys.
    """
    query, key = grid.query, grid.key
    positions = _counted(key)
    if query.document is None and key.document is None:
        longest = positions.amax(dim=1, keepdim=True) + 1
        return longest, longest
    rows = max(
        positions.shape[0], *(d.shape[0] for d in (query.document, key.document) if d is not None)
    )
    positions = positions.expand(rows, -1)
    documents = documents_of(key).expand(rows, -1).contiguous()
    ordered, order = documents.sort(dim=1)
    begins = torch.zeros_like(ordered)
    begins[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    group = begins.cumsum(1)
    longest = torch.full_like(positions, -torch.inf)
    longest = longest.scatter_reduce(1, group, positions.gather(1, order), "amax") + 1

    def of(wanted: Int[Tensor, "b L"]) -> Float[Tensor, "b L"]:
        wanted = wanted.expand(rows, -1).contiguous()
        at = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[1] - 1)
        present = ordered.gather(1, at) == wanted
        return longest.gather(1, group.gather(1, at)).masked_fill(~present, -torch.inf)

    return of(documents_of(query)), of(documents)


def _counted(layout: Layout) -> Float[Tensor, "b L"]:
    """Positions, −∞ for padding and special tokens."""
    positions, hidden = layout.positions[..., 0], hidden_tokens(layout)
    return positions if hidden is None else positions.masked_fill(hidden, -torch.inf)
