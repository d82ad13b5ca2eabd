"""Selective RoPE: rotations by running sums of frequencies that depend on the input."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Base, Count, EvenWidth, Width
from posenc.encoding import Entry, QueryKeyTransform, Rotation, repeat_heads
from posenc.encoding.tensors import Features, Keys, Queries
from posenc.encodings.common.checks import require_signal
from posenc.encodings.common.precision import WideLinear, at_least_single, geometric_frequencies
from posenc.encodings.common.prefix_sums import KeyRanks
from posenc.encodings.common.rotation import cos_sin
from posenc.errors import ArgumentError
from posenc.grid import Grid
from posenc.layout import Layout

EPS = 1e-6
"""Added to the square of a norm."""


class SelectiveRope(QueryKeyTransform):
    """Selective RoPE: each pair is rotated by a running sum of angles that tokens choose.

    ``q'_i = R(Φ_i) q_i``, ``k'_j = R(Φ_j) k_j``, ``Φ_i = τ ⊙ Σ_{s≤i} φ_s`` for each head,
    ``φ_s = Σ_m c_m ⊙ (W_2 W_1 x̂_{s-m})``, m = 0 … ``kernel`` - 1.

    x̂: the layer's input ``[B, L, C]``, each head's C/H features over ``√(|x|² + 10⁻⁶)``; W_1
    ``[rank, C]``, W_2 ``[H·D/2, rank]``, c ``[H·D/2, kernel]`` a causal depthwise convolution,
    each layer with its own; ``τ_t = base^(-2t/D)``, Φ in radians; pair t is features t and t + D/2.
    With ``gate``, φ_s is multiplied by ``σ(g_h · x̂_s + b_h)``. Sums and the convolution run over
    the document's real tokens, by order, sums in float64. Positions are not read. A cache keeps
    ``W_1 x̂``, from which sums are taken anew at each call. Differs from the authors' code in
    precision and in the order of the taps c, whose first is of the token itself.

    Args:
        dim: width C of the layer's input, a multiple of ``heads``.
        heads: query heads H.
        head_dim: width D of a head.
        rank: of the projection to frequencies.
        kernel: taps of the convolution.
        base: sets the slowest τ.
        gate: φ has a gate a head.

    Raises:
        ArgumentError: when ``head_dim`` is odd, ``heads`` does not divide ``dim``, or an argument
            is out of its domain.

    Reference: Movahedi et al. 2025, "Selective Rotary Position Embedding",
    https://arxiv.org/abs/2511.17388.

    >>> import posenc, torch
    >>> encoding = posenc.create("selective_rope", dim=16, heads=2, head_dim=8)
    >>> layout = encoding.observe(torch.randn(1, 3, 16), posenc.Layout.sequence(3))
    >>> q = torch.randn(1, 2, 3, 8)
    >>> encoding.query_key(q, q, posenc.Grid.of(layout))[0].shape
    torch.Size([1, 2, 3, 8])
    """

    axes = None
    tokenwise = False
    pairwise = False  # angles are sums over earlier tokens

    dim: Width
    heads: Count
    head_dim: EvenWidth
    rank: Count = 16
    kernel: Count = 4
    base: Base = 500000.0
    gate: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ArgumentError(
                "dim",
                expected=f"a multiple of the {self.heads} heads",
                got=self.dim,
                remedy="Each head has a share of the input's features.",
            )
        frequencies = self.heads * self.head_dim // 2
        self.down = WideLinear(self.dim, self.rank, bias=False)
        self.up = WideLinear(self.rank, frequencies, bias=False)
        self.taps = nn.Parameter(torch.empty(frequencies, self.kernel))
        self.gates = WideLinear(self.dim, self.heads) if self.gate else None

    def reset_parameters(self) -> None:
        """Draw initial values as PyTorch's linear layers and convolutions do."""
        for layer in (self.down, self.up, self.gates):
            if layer is not None:
                layer.reset_parameters()
        nn.init.uniform_(self.taps, -(self.kernel**-0.5), self.kernel**-0.5)

    def observe(self, x: Features, layout: Layout) -> Layout:
        of_heads = at_least_single(x).view(*x.shape[:-1], self.heads, self.dim // self.heads)
        x = (of_heads * (of_heads.square().sum(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
        signal = self.down(x)
        if self.gates is not None:
            signal = torch.cat([signal, self.gates(x).sigmoid()], dim=-1)
        return layout.with_signal(signal)

    def angles(self, grid: Grid) -> tuple[Float[Tensor, "b H Q T"], Float[Tensor, "b H K T"]]:
        """Φ of every query and key, in float64."""
        key, width = grid.key, self.rank + (self.heads if self.gate else 0)
        signal = require_signal(key, "selective_rope", width)
        if key.valid is not None:
            signal = signal.masked_fill(~key.valid.unsqueeze(-1), 0.0)
        ranks = KeyRanks.of(grid)
        taps = self.taps.to(signal.dtype)
        projected = self.up(signal[..., : self.rank]).mT  # [b, HT, K]
        steps = projected * taps[:, :1]
        for lag in range(1, self.kernel):
            steps = steps + ranks.earlier(projected, lag, key) * taps[:, lag : lag + 1]
        if self.gate:
            gates = signal[..., self.rank :].mT
            steps = steps * gates.repeat_interleave(self.head_dim // 2, dim=1)
        sums = ranks.running(steps)
        tau = geometric_frequencies(self.head_dim // 2, self.head_dim, self.base, like=sums[0])
        query, keys = (x.view(x.shape[0], self.heads, len(tau), x.shape[2]).mT * tau for x in sums)
        return query, keys

    def forward(self, q: Queries, k: Keys, grid: Grid) -> tuple[Queries, Keys]:
        return self._rotation(q, grid).apply(q, repeat_heads(k, self.heads))

    def lower(self, q: Queries, k: Keys, grid: Grid) -> Rotation | None:
        return self._rotation(q, grid) if k.shape[1] == self.heads else None

    def _rotation(self, q: Queries, grid: Grid) -> Rotation:
        wide = torch.promote_types(q.dtype, torch.float32)
        query, key = ([x.to(wide) for x in cos_sin(angle)] for angle in self.angles(grid))
        return Rotation((query[0], query[1]), (key[0], key[1]), "half")


ENTRY = Entry(
    factory=SelectiveRope,
    summary="Rotates queries and keys by running sums of angles that tokens choose.",
    relative=True,
    trainable=True,
    extrapolates="Degrades past the training length where sums reach angles not seen in it.",
    cost="(Q + K)·D·H and K·R·D·H; R numbers a cached token, R the rank",
    exceptions={
        "windows_are_windows": "the convolution of a window's first keys reads tokens before it"
    },
    sample={"rank": 3},
)
