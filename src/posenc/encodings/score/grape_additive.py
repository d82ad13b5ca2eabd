"""GRAPE's additive form: a penalty summed over the tokens from a key to a query."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, EvenWidth, Width
from posenc.encoding import Entry, FusedScore, LogGateSums, ScoreTerm, apply_rotation
from posenc.encoding.prepared import constant
from posenc.encoding.tensors import Features, Keys, Queries, Scores
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import WideLinear, at_least_single
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.encodings.common.rotation import cos_sin
from posenc.encodings.common.special_tokens import zero_special
from posenc.encodings.score.alibi import geometric_slopes
from posenc.grid import Grid
from posenc.layout import Layout


class GrapeAdditive(ScoreTerm):
    """GRAPE-AP: a sum of penalties over the tokens from a key to a query, by token and query.

    ``s_ij += Σ_{t=j+1..i} m_h · log σ(y_i · R(p_t) ŷ_t / E)``, ``y_t = W_h x_t``,
    ``ŷ = y / rms(y)``.

    x: the layer's input ``[B, L, C]``; W ``[E, C]`` a head; m_h: ALiBi's slopes, in logits; R
    rotates feature e and e + E/2 by ``-p_t`` radians, p in tokens; the sum is over the keys that
    the query sees, by order. Where W is zero it is ALiBi of slope ``m_h · log 2``. Not relative: R
    rotates by the token's own position. E numbers per token and head are cached. Differs from the
    authors' code in nothing; theirs defaults to the head's width for E, 8 in experiments.

    Args:
        dim: width C of the layer's input.
        heads: H.
        width: E, even.

    Raises:
        ArgumentError: when an argument is below 1, or ``width`` is odd.

    Reference: Zhang et al. 2025, "Group Representational Position Encoding",
    https://arxiv.org/abs/2512.07805.

    >>> import posenc, torch
    >>> grape = posenc.create("grape_additive", dim=64, heads=4)
    >>> grape.observe(torch.randn(1, 5, 64), posenc.Layout.sequence(5)).signal.shape
    torch.Size([1, 5, 32])
    """

    causal_only = True
    pairwise = False

    dim: Width
    heads: Count
    width: EvenWidth = 8

    def __post_init__(self) -> None:
        self.project = WideLinear(self.dim, self.heads * self.width, bias=False)

    def reset_parameters(self) -> None:
        """Draw W with deviation ``1 / (2√C)``, as the authors' code does."""
        nn.init.normal_(self.project.weight, std=0.5 * self.dim**-0.5)

    def observe(self, x: Features, layout: Layout) -> Layout:
        return layout.with_signal(self.project(at_least_single(x)))

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        products = self._vectors(grid.query) @ self._path(grid.key).mT / self.width
        slopes = constant(geometric_slopes(self.heads), like=products).view(-1, 1, 1)
        steps = slopes * nn.functional.logsigmoid(products)
        return KeyRanks.of(grid).after_key(steps.masked_fill(~grid.visible, 0.0))

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        path = self._path(grid.key, 1 / self.width)
        slopes = constant(geometric_slopes(self.heads), like=path)
        return LogGateSums(self._vectors(grid.query), path, slopes)

    def _path(self, key: Layout, factor: float = 1.0) -> Float[Tensor, "b H K E"]:
        """The keys' normalized vectors times a factor, rotated by their positions."""
        path, small = self._vectors(key), torch.finfo(torch.float32).eps
        path = path * ((path.square().mean(-1, keepdim=True) + small).rsqrt() * factor)
        angles = zero_special(-key.positions.expand(-1, -1, self.width // 2), key)
        return apply_rotation(path, *cos_sin(angles), "half")

    def _vectors(self, layout: Layout) -> Float[Tensor, "b H L E"]:
        signal = require_signal(layout, type(self).__name__, self.heads * self.width)
        return signal.view(*signal.shape[:2], self.heads, self.width).transpose(1, 2)


ENTRY = Entry(
    factory=GrapeAdditive,
    summary="Lowers logits by a sum over the tokens between key and query, weighted by the query.",
    relative=False,
    trainable=True,
    extrapolates="Holds, as published: the penalty grows with distance, as ALiBi's does.",
    cost="Q·K·E·H",
)
