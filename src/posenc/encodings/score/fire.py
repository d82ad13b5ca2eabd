"""Functional interpolation of relative positions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Positive, Width
from posenc.encoding import DistanceFunction, Entry, FusedScore, ScoreTerm
from posenc.encoding.prepared import is_plain_linear
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.precision import WideLinear
from posenc.grid import Grid


class Fire(ScoreTerm):
    """FIRE: a small MLP of the distance relative to the query's position.

    ``s_ij += f_h(log(c·|Δ| + 1) / log(c·max(p_i, L) + 1))``.

    Δ = j - i and the query's position ``p_i`` in tokens, any real; ``c`` per token and the
    threshold ``L`` in tokens are learned numbers; f: one hidden ReLU layer, from a number to H
    logits. While p_i ≤ L the bias depends on Δ alone; beyond, the same share of a longer past gives
    the same bias, so that no input to f is new at any length. Differs from the paper, which is
    causal, in serving keys ahead too, by |Δ| (symmetric) and |p_i|.

    Args:
        heads: H.
        hidden: width of the hidden layer.
        scale: initial c, positive.
        threshold: initial L in tokens, positive.

    Raises:
        ArgumentError: when an argument is out of its domain.

    Reference: Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long
    Context Transformers", https://arxiv.org/abs/2310.04418.

    >>> import posenc
    >>> posenc.create("fire", heads=8).score.input.weight.shape
    torch.Size([32, 1])
    """

    by_position = True

    EPSILON = 1e-6

    heads: Count
    hidden: Width = 32
    scale: Positive = 0.1
    threshold: Positive = 512.0

    def __post_init__(self) -> None:
        self.input, self.output = WideLinear(1, self.hidden), WideLinear(self.hidden, self.heads)
        self.rate, self.stretch = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def reset_parameters(self) -> None:
        """Set the given c and L, and draw the network."""
        self.input.reset_parameters()
        self.output.reset_parameters()
        with torch.no_grad():
            self.rate.fill_(self.scale)
            self.stretch.fill_(1.0)

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        return self.bias(grid.query.positions[..., 0], grid.offset[..., 0])

    def bias(self, positions: Float[Tensor, "b Q"], offset: Float[Tensor, "b Q K"]) -> Scores:
        """The bias of queries at ``positions`` to keys at ``offset`` from them."""
        share = self._logarithm(offset) / self._most(positions).unsqueeze(-1)
        hidden = torch.relu(self.input(share.unsqueeze(-1)))
        logits: Tensor = self.output(hidden)
        return logits.movedim(-1, 1)

    def fuse(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> FusedScore | None:
        if not (is_plain_linear(self.input) and is_plain_linear(self.output)):  # adapted, say
            return None
        factor = self._most(grid.query.positions[..., 0]).reciprocal()
        weight, bias = (x.to(factor.dtype) for x in (self.input.weight[:, 0], self.input.bias))
        with torch.no_grad():
            # A unit bends f at its knot; shares are never negative.
            knots = (-bias / weight).where(weight != 0, 0.0).clamp(min=0.0)
            knots, order = knots.sort()
            rank = order.argsort().unsqueeze(-1)
            piece = torch.arange(len(knots) + 1, device=knots.device)
            beyond = piece > rank  # [hidden, pieces]
            active = torch.where((weight > 0).unsqueeze(-1), beyond, ~beyond)
            active = torch.where((weight == 0).unsqueeze(-1), (bias > 0).unsqueeze(-1), active)
        output, constant = (x.to(factor.dtype) for x in (self.output.weight, self.output.bias))
        used = active.to(factor.dtype)
        return DistanceFunction(
            distance=self._logarithm,
            factor=factor,
            knots=knots,
            slope=(output * weight) @ used,
            intercept=(output * bias) @ used + constant.unsqueeze(-1),
        )

    def _logarithm(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """log(c·|Δ| + 1)."""
        return torch.log((self.rate.to(offset.dtype) * offset).abs() + 1)

    def _most(self, positions: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """log(c·max(p_i, L) + 1), above 0."""
        # L is learned through a factor, as in the authors' listing: tokens are a poor unit to
        # take gradient steps in.
        threshold = (self.stretch.to(positions.dtype) * self.threshold).abs()
        return self._logarithm(torch.maximum(positions.abs(), threshold)) + self.EPSILON


ENTRY = Entry(
    factory=Fire,
    summary="Gives each head's bias by a small MLP of the distance over the query's position.",
    relative=False,
    trainable=True,
    extrapolates="Holds past the training length: its inputs stay in the trained range.",
    cost="Q·K·(H + hidden)",
    sharing="layers",
)
