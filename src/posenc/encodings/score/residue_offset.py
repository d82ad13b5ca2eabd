"""Biases by residues and chains of a protein."""

from __future__ import annotations

import torch
from torch import nn

from posenc.arguments import Count, Natural
from posenc.encoding import BucketedTerms, Entry, ScoreTerm
from posenc.encoding.tensors import BucketIndex, Keys, Offsets, Queries, Scores, StructuredTerms
from posenc.encodings.common.special_tokens import has_special, zero_special_pairs
from posenc.grid import Grid


class ResidueOffset(ScoreTerm):
    """Residue offset: a learned number for each clipped offset in a chain, and one for two chains.

    ``s_ij += b[h, n]``, ``n = clip(r_i - r_j, -k, k) + k`` where i and j are of one chain, else
    ``n = 2k + 1``.

    Positions have two axes: the index of the residue r in its chain (a fractional offset is
    rounded) and the number of the chain; ``k = max_distance``; b ``[H, 2k + 2]`` in logits. The
    offset is that of the query less that of the key. Pairs with a special token have no bias.
    Differs from AlphaFold 3, which adds a vector a class to its representation of pairs, from which
    each layer projects biases, in being that bias. Boltz has the same 66 classes; Chai-1 has 67,
    since there offsets below -k have a class of their own, but not those above k.

    Args:
        heads: H.
        max_distance: k, in residues; larger offsets share the last number on their side.

    Raises:
        ArgumentError: when ``heads`` or ``max_distance`` is out of its domain.

    Reference: Abramson et al. 2024, "Accurate structure prediction of biomolecular interactions
    with AlphaFold 3", https://doi.org/10.1038/s41586-024-07487-w, supplement, algorithm 3.

    >>> import posenc, torch
    >>> score = posenc.create("residue_offset", heads=4).score
    >>> score.bucket(torch.tensor([[0.0, 0.0], [3.0, 0.0], [-99.0, 0.0], [0.0, -1.0]])).tolist()
    [32, 29, 64, 65]
    """

    axes = (2,)
    by_position = True

    heads: Count
    max_distance: Natural = 32

    def __post_init__(self) -> None:
        self.table = nn.Parameter(torch.empty(self.heads, 2 * self.max_distance + 2))

    def reset_parameters(self) -> None:
        """Draw initial values, normal with standard deviation 0.02."""
        nn.init.normal_(self.table, std=0.02)

    def bucket(self, offset: Offsets) -> BucketIndex:
        """Class of each offset Δ = key - query ``[..., 2]``, 0 … 2k + 1."""
        limit = self.max_distance
        within = limit - offset[..., 0].round().clamp(-limit, limit).long()
        return torch.where(offset[..., 1] == 0, within, 2 * limit + 1)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return zero_special_pairs(self.table[:, self.bucket(grid.offset)].transpose(0, 1), grid)

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        return None if has_special(grid) else (BucketedTerms(self.bucket, table=self.table),)


ENTRY = Entry(
    factory=ResidueOffset,
    summary="Adds a learned number for each clipped offset in a chain, and one for other chains.",
    relative=True,
    trainable=True,
    extrapolates="Degrades slowly: offsets beyond the clip distance share a number.",
    cost="Q·K·H; a table of H·(2k + 2) numbers",
)
