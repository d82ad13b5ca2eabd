"""Positions by accumulated Householder transformations."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posenc.arguments import Count, Width
from posenc.encoding import BlockTransforms, Entry, FusedScore, ScoreTerm
from posenc.encoding.tensors import Features, Keys, Queries, Scores, repeat_heads
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import WideLinear, at_least_single
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.grid import Grid
from posenc.layout import Layout


class Path(ScoreTerm):
    """PaTH: keys are transformed by token-dependent Householder matrices up to the query.

    ``s_ij = scale · q_i · H_i H_{i-1} … H_{j+1} k_j``, ``H_t = I - β_t w_t w_tᵀ``,
    ``β_t = 2σ(u_h · x_t + b_h)``, ``w_t`` of length 1: the direction of
    ``silu(Σ_s c_s ⊙ W x_{t-s})`` with s = 0 … kernel - 1.

    x: the layer's input ``[B, L, C]``; β in (0, 2) a token and head; w ``[D]`` a token and head; W
    of rank ``rank``, c ``[kernel, H·D]``. By order, over the document's real tokens. The signal
    kept for each token is its ``rank`` numbers in between and H for β. Positions are not read. It
    differs from the paper in having a w for every query head, where the authors share one among
    those that share keys, and has no forget gate (theirs is optional).

    Args:
        dim: width C of the layer's input.
        heads: H.
        head_dim: width D of a head.
        rank: of the map from x to w.
        kernel: tokens that a direction is computed from; 1 for x alone, without silu.

    Raises:
        ArgumentError: when an argument is below 1.

    Reference: Yang et al. 2025, "PaTH Attention: Position Encoding via Accumulating Householder
    Transformations", https://arxiv.org/abs/2505.16381.

    >>> import posenc, torch
    >>> path = posenc.create("path", dim=64, heads=8)
    >>> path.observe(torch.randn(1, 5, 64), posenc.Layout.sequence(5)).signal.shape
    torch.Size([1, 5, 40])
    """

    causal_only = True
    pairwise = False
    keys_by_keys = True
    axes = None

    EPSILON = 1e-6

    dim: Width
    heads: Count
    head_dim: Width
    rank: Width = 32
    kernel: Count = 3

    def __post_init__(self) -> None:
        width = self.heads * self.head_dim
        self.narrow = WideLinear(self.dim, self.rank, bias=False)
        self.wide = WideLinear(self.rank, width, bias=False)
        self.strength = WideLinear(self.dim, self.heads)
        self.taps = nn.Parameter(torch.empty(self.kernel, width)) if self.kernel > 1 else None

    def reset_parameters(self) -> None:
        """Draw maps with deviation 0.02 and taps as a convolution's, as the authors' code does."""
        for layer in (self.narrow, self.wide, self.strength):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.strength.bias)
        if self.taps is not None:
            bound = self.taps.shape[0] ** -0.5
            nn.init.uniform_(self.taps, -bound, bound)

    def observe(self, x: Features, layout: Layout) -> Layout:
        wide = at_least_single(x)
        signal = torch.cat([self.narrow(wide), self.strength(wide)], dim=-1)
        return layout.with_signal(signal)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        ranks = KeyRanks.of(grid)
        directions, strengths = self._reflections(grid, ranks)
        directions, strengths = directions.to(q.dtype), strengths.to(q.dtype)
        # A product of reflections is I - Wᵀ T W with T = (1 + lower(β W Wᵀ))⁻¹ β, and T of some
        # tokens in a row is that block of T: one T serves every pair (the UT transform).
        rank = torch.arange(k.shape[2], device=k.device)
        along = directions @ directions.mT * strengths.unsqueeze(-1)
        passed = (rank.unsqueeze(-1) > ranks.of_keys.unsqueeze(-2)).unsqueeze(1)
        onto = (directions @ k.mT * strengths.unsqueeze(-1)).where(passed, 0.0)
        lost: Tensor = torch.linalg.solve_triangular(
            along.tril(-1), onto, upper=False, unitriangular=True
        )
        reached = (rank < ranks.query_until.unsqueeze(-1)).unsqueeze(1)
        return -scale * ((q @ directions.mT).where(reached, 0.0) @ lost)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        first = _key_at_offset_zero(grid)
        if first is None:
            return None
        reflections = partial(self._reflections_of, grid.key)
        return BlockTransforms(q, repeat_heads(k, self.heads), first, scale, reflections)

    def _reflections(
        self, grid: Grid, ranks: KeyRanks
    ) -> tuple[Float[Tensor, "b H K D"], Float[Tensor, "b H K"]]:
        """w and β of the keys in the order of their ranks; β is 0 for padding."""
        key = grid.key
        signal = require_signal(key, "Path", self.rank + self.heads)
        signal = ranks.arrange(signal.mT).mT
        real = _arranged(ranks, key.valid, key)
        document = _arranged(ranks, key.document, key)
        return self._reflect(signal, real, document)

    def _reflections_of(
        self, key: Layout
    ) -> tuple[Float[Tensor, "b H K D"], Float[Tensor, "b H K"]]:
        """w and β of the keys in the order in which they are stored."""
        signal = require_signal(key, "Path", self.rank + self.heads)
        rows = max(signal.shape[0], key.order.shape[0])
        real, document = (
            None if x is None else x.expand(rows, -1) for x in (key.valid, key.document)
        )
        return self._reflect(signal.expand(rows, -1, -1), real, document)

    def _reflect(
        self,
        signal: Float[Tensor, "b K S"],
        real: Bool[Tensor, "b K"] | None,
        document: Int[Tensor, "b K"] | None,
    ) -> tuple[Float[Tensor, "b H K D"], Float[Tensor, "b H K"]]:
        latent, logits = signal[..., : self.rank], signal[..., self.rank :]
        vectors = self.wide(latent)
        if self.taps is not None:
            vectors = _convolve(vectors, self.taps, real, document)
        vectors = vectors.view(*vectors.shape[:2], -1, self.head_dim).transpose(1, 2)
        length = (vectors.square().sum(-1, keepdim=True) + self.EPSILON).rsqrt()
        strengths = 2 * torch.sigmoid(logits)
        if real is not None:
            strengths = strengths.masked_fill(~real.unsqueeze(-1), 0.0)
        return vectors * length, strengths.mT


def _convolve(
    vectors: Float[Tensor, "b K HD"],
    taps: Float[Tensor, "S HD"],
    real: Bool[Tensor, "b K"] | None,
    document: Tensor | None,
) -> Float[Tensor, "b K HD"]:
    """silu of the causal depthwise convolution over the real tokens of each document."""
    if real is not None:
        vectors = vectors.masked_fill(~real.unsqueeze(-1), 0.0)
    taps, length = taps.to(vectors.dtype), vectors.shape[1]
    total = vectors * taps[0]
    for back in range(1, len(taps)):
        earlier = nn.functional.pad(vectors, (0, 0, back, 0))[:, :length]
        if document is not None:
            before = nn.functional.pad(document, (back, 0))[:, :length]
            earlier = earlier.masked_fill((before != document).unsqueeze(-1), 0.0)
        total = total + earlier * taps[back]
    return nn.functional.silu(total)


def _key_at_offset_zero(grid: Grid) -> int | None:
    """Index of the first query's key of offset 0, if the next queries' keys follow; else None."""
    query, key = grid.query, grid.key
    if grid.shift is not None and not grid.segmented:
        first = -grid.shift
        return first if 0 <= first <= key.length - query.length else None
    first = key.length - query.length
    if first < 0:
        return None
    last = key.slice(first, key.length)
    for one, other in ((query.order, last.order), (query.document, last.document)):
        if one is not other and (one is None or other is None or not torch.equal(one, other)):
            return None
    return first


def _arranged(ranks: KeyRanks, marks: Tensor | None, key: Layout) -> Tensor | None:
    """Marks of the keys in the order of their ranks."""
    if marks is None:
        return None
    return ranks.arrange(marks.expand(max(marks.shape[0], key.order.shape[0]), -1))


ENTRY = Entry(
    factory=Path,
    summary="Reflects each key along directions computed from the tokens up to the query.",
    relative=True,
    trainable=True,
    extrapolates="Fair; the paper finds it better than RoPE, best with forget gates.",
    cost="K²·(K + D)·H; memory of K×K·H a batch row",
    exceptions={
        "windows_are_windows": "directions come from a convolution, which reaches two tokens "
        "past the window"
    },
)
