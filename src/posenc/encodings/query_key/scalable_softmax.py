"""Scalable softmax: logits times a learned logarithm of the number of keys."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.arguments import Count, Length, checked
from posenc.encoding import Encoding, Entry
from posenc.encoding.scaling import LogitFactor


@checked
def scalable_softmax(*, heads: Count, length: Length = 1024, bias: bool = False) -> Encoding:
    """Scalable softmax (SSMax): logits grow with the logarithm of the number of keys.

    ``s_ij = κ_ih · scale · q_i·k_j``, ``κ_ih = s_h ln n_i + b_h``.

    n_i: the keys that a query sees, ``p_i + 1`` under a causal mask (of any window), else the
    largest key position + 1 of its row or document. s, b: learned, one a head and layer; s is
    initially 1 over the mean of ``ln n`` for n = 1 … ``length``, b, where there is one, 0. Added to
    other encodings, it multiplies their logits too, biases included:
    ``posenc.create("rope+scalable_softmax", …)``. Mistral Large 4 has it with b, on RoPE. Differs
    from the paper in one thing: a κ within 2^-14 of 0, such as that of a single key, is 2^-14. For
    models trained without it there is ``posenc.extension.log_n``.

    Args:
        heads: query heads H.
        length: for which κ is 1 on average initially.
        bias: b is learned; otherwise it is 0.

    Raises:
        ArgumentError: when an argument is out of its domain, or it is added to weights that are no
            softmax (stick_breaking).

    Reference: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention",
    https://arxiv.org/abs/2501.19399.

    >>> import posenc
    >>> posenc.create("rope+scalable_softmax", heads=2, head_dim=8).query_key
    ScaledQueries(
      (inner): Rope(head_dim=8)
      (factor): LearnedLogFactor(heads=2, length=1024, bias=False)
    )
    """
    return Encoding().scaled(LearnedLogFactor(heads=heads, length=length, bias=bias))


class LearnedLogFactor(LogitFactor):
    """``κ = s_h ln n + b_h``; see ``scalable_softmax``."""

    axes = (1,)

    heads: Count
    length: Length = 1024
    bias: bool = False

    def __post_init__(self) -> None:
        self.slope = nn.Parameter(torch.empty(self.heads))
        self.intercept = nn.Parameter(torch.empty(self.heads)) if self.bias else None

    def reset_parameters(self) -> None:
        """Set s so that κ is 1 on average up to ``length``, and b to 0."""
        mean = math.lgamma(self.length + 1) / self.length
        nn.init.constant_(self.slope, 1 / max(mean, math.log(2) / 2))
        if self.intercept is not None:
            nn.init.zeros_(self.intercept)

    def forward(self, n: Float[Tensor, "b q"]) -> Float[Tensor, "b h q"]:
        factor = self.slope.to(n.dtype).unsqueeze(-1) * n.clamp(min=1).log().unsqueeze(1)
        return factor if self.intercept is None else factor + self.intercept.to(n.dtype)[:, None]


ENTRY = Entry(
    factory=scalable_softmax,
    summary="Multiplies the logits by a learned logarithm of the number of keys.",
    sites=("query_key",),
    relative=False,
    trainable=True,
    extrapolates="Holds better: attention stays as sharp among more keys.",
    cost="Q·D·H",
)
