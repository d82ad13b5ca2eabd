"""Attention with linear biases."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count
from posenc.encoding import Entry
from posenc.encoding.prepared import constant
from posenc.encodings.common.buckets import OffsetBias
from posenc.errors import ArgumentError


class Alibi(OffsetBias):
    """ALiBi: a penalty that grows linearly with distance, at another rate in each head.

    ``s_ij += -m_h · |Δ|``, ``m_h = 2^(-8h/H)`` for h = 1 … H (section 3).

    Δ = j - i in tokens, any real; ``m_h`` in logits a token, positive. With H not a power of 2 the
    slopes are those of the next lower power n, followed by every other slope of 2n, as in the
    authors' code.

    Unlike the paper's, attention may be bidirectional: symmetric by default, or with separate
    slopes for keys ahead of the query (``asymmetric``).

    Args:
        heads: H.
        learned: slopes are parameters (kept positive by an exponential) that start at m.
        asymmetric: separate slopes for keys ahead; only with ``learned``, since they start equal.

    Raises:
        ArgumentError: when ``heads`` is below 1, or ``asymmetric`` comes without ``learned``.

    Reference: Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables
    Input Length Extrapolation", https://arxiv.org/abs/2108.12409.

    >>> import posenc, torch
    >>> alibi = posenc.create("alibi", heads=8).score
    >>> alibi.bias(torch.tensor([-2.0, 0.0]))[0].tolist()
    [-1.0, -0.0]
    """

    heads: Count
    learned: bool = False
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if self.asymmetric and not self.learned:
            raise ArgumentError(
                "asymmetric",
                expected="learned=True beside it",
                got="fixed slopes, which would be symmetric all the same",
                remedy="Pass learned=True.",
            )
        slopes = torch.empty(2 if self.asymmetric else 1, self.heads)
        self.log_slopes = nn.Parameter(slopes) if self.learned else None

    def reset_parameters(self) -> None:
        """Start learned slopes at m."""
        if self.log_slopes is not None:
            with torch.no_grad():
                self.log_slopes.copy_(torch.tensor(geometric_slopes(self.heads)).log())

    def bias(self, offset: Float[Tensor, "*dims"]) -> Float[Tensor, H * dims]:
        distance = offset.abs()
        if self.log_slopes is None:
            past = ahead = constant(geometric_slopes(self.heads), like=distance)
        else:
            slopes = self.log_slopes.to(distance.dtype).exp()
            past, ahead = slopes[0], slopes[-1]
        column = (-1, *(1,) * offset.dim())
        slope = torch.where(offset > 0, ahead.view(column), past.view(column))
        return -slope * distance


def geometric_slopes(heads: int) -> list[float]:
    """ALiBi's slopes, head by head, in the order of the authors' code."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return slopes + between


ENTRY = Entry(
    factory=Alibi,
    summary="Lowers the logits in proportion to distance, at another rate in each head.",
    relative=True,
    trainable=False,
    extrapolates="Holds far past the training length; what is far away fades.",
    cost="Q·K·H; a table of Q + K offsets on regular layouts",
    sharing="layers",
)
