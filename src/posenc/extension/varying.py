"""RoPE with frequencies that depend on the length of the text, by row or document."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding import QueryKeyTransform, Rotation
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.common.precision import angles_at, wider
from posenc.encodings.common.rotation import cos_sin
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.query_key.rope import Rope
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.layout.padding import documents_of, hidden_tokens


class VaryingRope(QueryKeyTransform, ABC):
    """RoPE with frequencies divided depending on the length n of the input.

    n is the largest key position + 1 of the row or document in each call: all keys, cached ones
    too, are rotated for it. Rows do not affect one another. Under token-by-token decoding the past
    is rotated for a new n in each step, in one pass for the last n.

    Subclasses define ``divisors``.

    Args:
        rope: as trained.
        length: the trained length L.
        gain: factor of rotated features.
    """

    tokenwise = False
    pairwise = False

    rope: Rope
    length: float
    gain: float = 1.0

    def __post_init__(self) -> None:
        self.head_dim = self.rope.head_dim

    @abstractmethod
    def divisors(self, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b l T"]:
        """Divisors of each pair's frequency at these lengths."""

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self._rotation(q, grid).apply(q, k)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        return self._rotation(q, grid)

    def _rotation(self, q: Queries, grid: Grid) -> Rotation:
        sides = zip((grid.query, grid.key), seen_lengths(grid), strict=True)
        query, key = (cos_sin(self._angles(*side), gain=self.gain) for side in sides)
        return Rotation(query, key, self.rope.pairing)

    def _angles(self, layout: Layout, lengths: Float[Tensor, "b l"]) -> Float[Tensor, "b L T"]:
        positions = layout.positions[..., :1]
        speeds = self.rope.frequencies(like=wider(positions)) / self.divisors(lengths)
        return zero_special(angles_at(positions, speeds), layout)


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
