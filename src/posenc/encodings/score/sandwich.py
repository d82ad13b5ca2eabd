"""Sinusoids as a relative bias."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Base, Count, EvenWidth, checked
from posenc.encodings.common.frequencies import angles_at, geometric_frequencies
from posenc.encodings.common.offset_bias import OffsetBias
from posenc.encodings.common.precision import wider
from posenc.entry import Claims, Entry


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

    Reference: Chi et al. 2023, "Dissecting Transformer Length Extrapolation via the Lens of
    Receptive Field Analysis", https://arxiv.org/abs/2212.10356.

    >>> import posenc, torch
    >>> sandwich = posenc.create("sandwich", heads=8, width=4).score
    >>> sandwich.bias(torch.tensor([0.0]))[:2].flatten().tolist()
    [2.0, 1.0]
    """

    heads: int

    @checked
    def __init__(self, *, heads: Count, width: EvenWidth = 128, base: Base = 10000.0) -> None:
        super().__init__()
        self.heads, self.width, self.base = heads, width, base

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, "H *dims"]:
        wide = wider(offset)
        frequencies = geometric_frequencies(self.width // 2, self.width, self.base, like=wide)
        similarity = torch.zeros_like(offset)
        for part in torch.split(frequencies, self.heads):  # at most the result's size at a time
            similarity = similarity + angles_at(offset.unsqueeze(-1), part).cos().sum(-1)
        heads = torch.arange(1, self.heads + 1, dtype=offset.dtype, device=offset.device)
        ratios = (heads * (8 / self.heads)).view(-1, *(1,) * offset.dim())
        return similarity / ratios


ENTRY = Entry(
    factory=Sandwich,
    summary="Adds the inner product of sinusoidal position vectors, scaled in each head.",
    claims=Claims(
        relative=True,
        trainable=False,
        extrapolates="Holds past the training length.",
        cost="Q·K·H; a table of Q + K offsets on regular layouts",
    ),
    sharing="layers",
)
