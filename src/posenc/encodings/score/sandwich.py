"""Sinusoids as a relative bias."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Count, EvenWidth
from posenc.encoding import BucketedTerms, Entry
from posenc.encoding.prepared import reused
from posenc.encoding.tensors import Keys, Queries, StructuredTerms
from posenc.encodings.common.buckets import OffsetBias, offset_index
from posenc.encodings.common.precision import angles_at, geometric_frequencies, wider
from posenc.grid import Grid
from posenc.runtime import has_values

KEPT = 2**17
"""Distances up to which sums are kept from call to call."""

CHUNK = 8
"""Frequencies whose cosines are summed at a time."""


class Sandwich(OffsetBias):
    """Sandwich: the inner product of two sinusoidal position vectors, as a bias by distance.

    ``s_ij += (Σ_t cos(Δ / base^(2t/d̄))) / (8h/H)``, t = 0 … d̄/2 - 1, h = 1 … H (section 5).

    Δ = j - i in tokens, any real; ``d̄ = width``; ``8h/H`` is the compression ratio of head h. The
    sum falls from d̄/2 about logarithmically with distance. Differs from the paper in nothing.

    Args:
        heads: H.
        width: d̄, width of the position vectors, 128 in the paper.
        base: of the frequencies.

    Raises:
        ArgumentError: when ``heads`` is below 1, ``width`` odd or below 2, or ``base`` at most 1.

    Reference: Chi et al. 2022, "Dissecting Transformer Length Extrapolation via the Lens of
    Receptive Field Analysis", https://arxiv.org/abs/2212.10356.

    >>> import posenc, torch
    >>> sandwich = posenc.create("sandwich", heads=8, width=4).score
    >>> sandwich.bias(torch.tensor([0.0]))[:2].flatten().tolist()
    [2.0, 1.0]
    """

    heads: Count
    width: EvenWidth = 128
    base: Base = 10000.0

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, "H *dims"]:
        return self._divided(_similarity(offset, self.width, self.base))

    def lower(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> StructuredTerms | None:
        if grid.shift is None or q.device.type != "cpu" or not has_values(q):
            return super().lower(q, k, grid, scale=scale)
        offsets = grid.distinct_offsets(device=q.device)
        farthest = max(abs(grid.shift - grid.query.length + 1), grid.shift + grid.key.length - 1)
        if farthest >= KEPT:
            return super().lower(q, k, grid, scale=scale)
        dtype = torch.promote_types(grid.query.positions.dtype, grid.key.positions.dtype)
        # A power of two, so that a sequence that grows reads the same sums again and again.
        similarity = _kept_similarity(1 << farthest.bit_length(), self.width, self.base, dtype)
        return (BucketedTerms(offset_index(grid), table=self._divided(similarity[offsets.abs()])),)

    def _divided(self, similarity: Float[Tensor, "*dims"]) -> Float[Tensor, "H *dims"]:
        """``similarity`` divided by each head's compression ratio."""
        heads = torch.arange(1, self.heads + 1, dtype=similarity.dtype, device=similarity.device)
        return similarity / (heads * (8 / self.heads)).view(-1, *(1,) * similarity.dim())


def _similarity(offset: Float[Tensor, "*dims"], width: int, base: float) -> Float[Tensor, "*dims"]:
    """The sum of the cosines at every offset."""
    frequencies = geometric_frequencies(width // 2, width, base, like=wider(offset))
    similarity = torch.zeros_like(offset)
    for part in torch.split(frequencies, CHUNK):  # little memory at a time
        similarity = similarity + angles_at(offset.unsqueeze(-1), part).cos().sum(-1)
    return similarity


def _kept_similarity(
    count: int, width: int, base: float, dtype: torch.dtype
) -> Float[Tensor, " N"]:
    """The sums at the distances 0 … ``count`` - 1, on the CPU."""
    distances = torch.arange(count, dtype=dtype, device="cpu")
    compute = partial(_similarity, distances, width, base)
    return reused(compute, "similarity", count, width, base, dtype)


ENTRY = Entry(
    factory=Sandwich,
    summary="Adds the inner product of sinusoidal position vectors, scaled in each head.",
    relative=True,
    trainable=False,
    extrapolates="Holds past the training length.",
    cost="Q·K·H; a table of Q + K offsets on regular layouts",
    sharing="layers",
)
