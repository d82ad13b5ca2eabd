"""GRAPE's multiplicative form: rotations in learned planes."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, EvenWidth
from posenc.encoding import Entry, Rotation
from posenc.encoding.prepared import reused
from posenc.encoding.tensors import Keys, Queries
from posenc.encodings.common.precision import (
    angles_at,
    at_least_single,
    geometric_frequencies,
    wider,
)
from posenc.encodings.common.rotation import Rotary
from posenc.grid import Grid
from posenc.layout import Layout


class GrapeMultiplicative(Rotary):
    """GRAPE-M: RoPE with learned planes and frequencies.

    ``q'_i = G(p_i) q_i``, ``k'_j = G(p_j) k_j``, ``G(p) = exp(p · Σ_t θ_t (b_t a_tᵀ - a_t b_tᵀ))``,
    the commuting case: all a and b are orthonormal.

    p in tokens, any real; θ ``[D/2]`` in radians per token, positive, initially RoPE's; a and b the
    columns of an orthogonal ``[D, D]``, the Cayley transform of a skew-symmetric matrix, initially
    RoPE's planes; shared by the heads. Since the columns cancel in ``q'·k'``, q and k are rotated
    in plane coordinates only. The authors' experiments fix the planes at RoPE's, which is ``rope``
    with ``learned=True``. Differs from the paper in omitting non-commuting mixtures.

    Args:
        head_dim: width D of a head.
        base: sets the initial frequencies.

    Raises:
        ArgumentError: when ``head_dim`` is odd or ``base`` out of its domain.

    Reference: Zhang et al. 2025, "Group Representational Position Encoding",
    https://arxiv.org/abs/2512.07805.

    >>> import posenc, torch
    >>> grid = posenc.Grid.of(posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> posenc.create("grape_multiplicative", head_dim=8).query_key(q, q, grid)[0].shape
    torch.Size([1, 2, 3, 8])
    """

    head_dim: EvenWidth
    base: Base = 10000.0

    def __post_init__(self) -> None:
        self.log_frequencies = nn.Parameter(torch.empty(self.head_dim // 2))
        self.skew = nn.Parameter(torch.empty(self.head_dim * (self.head_dim - 1) // 2))

    def reset_parameters(self) -> None:
        """Set RoPE's frequencies and planes."""
        like, pairs = self.log_frequencies, self.head_dim // 2
        theta = geometric_frequencies(pairs, self.head_dim, self.base, like=like)
        with torch.no_grad():
            self.log_frequencies.copy_(theta.log())
            self.skew.zero_()

    def planes(self, *, like: Tensor) -> Float[Tensor, "D D"]:
        """The orthogonal matrix whose columns t and t + D/2 span plane t: ``(1 + S)⁻¹ (1 - S)``."""
        size = self.head_dim
        row, column = torch.triu_indices(size, size, 1, device=like.device)
        upper = like.new_zeros(size, size).index_put((row, column), self.skew.to(like.dtype))
        skew, one = upper - upper.mT, torch.eye(size, dtype=like.dtype, device=like.device)
        planes: Tensor = torch.linalg.solve(one + skew, one - skew)
        return planes

    def angles(self, layout: Layout) -> Float[Tensor, "b L T"]:
        return angles_at(layout.positions, wider(self.log_frequencies).exp())

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        wide = at_least_single(q)
        compute = partial(self.planes, like=wide)
        planes = reused(compute, "planes", wide.dtype, layers=(self,))
        rotated = super().forward(wide @ planes, k.to(wide.dtype) @ planes, grid)
        return rotated[0].to(q.dtype), rotated[1].to(k.dtype)

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        return None  # planes mix features before the rotation


ENTRY = Entry(
    factory=GrapeMultiplicative,
    summary="Rotates queries and keys by angles proportional to position, in learned planes.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length, as RoPE does.",
    cost="(Q + K)·D²·H",
)
