"""Context-aware biases."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Entry
from posenc.encodings.common.prefix_sums import GatedDecay


class Cable(GatedDecay):
    """CABLE: a bias by distance, to which each token adds a learned, token-dependent length.

    ``s_ij += c_i - c_j``, ``c_i = -Σ_{t≤i} softplus(w_h · x_t + b_h)``.

    x: the layer's input ``[B, L, C]``; softplus of it, the token's length, in logits, positive; the
    sums run over the document's real tokens, by order. Positions are not read. Differs from the
    authors' code in nothing but the scale of q·k, which is the attention's (theirs divides by 1).
    As ``-softplus(z) = log σ(-z)`` it is ``forgetting`` with w and b negated.

    Args:
        dim: width C of the layer's input.
        heads: H.

    Raises:
        ArgumentError: when an argument is below 1.

    Reference: Veisi et al. 2025, "Context-aware Biases for Length Extrapolation",
    https://arxiv.org/abs/2503.08067.

    >>> import posenc, torch
    >>> cable = posenc.create("cable", dim=64, heads=8)
    >>> cable.observe(torch.randn(1, 5, 64), posenc.Layout.sequence(5)).signal.shape
    torch.Size([1, 5, 8])
    """

    def steps(self, gates: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        return -torch.nn.functional.softplus(gates)


ENTRY = Entry(
    factory=Cable,
    summary="Lowers logits by the sum of learned token lengths between key and query.",
    relative=True,
    trainable=True,
    extrapolates="Holds well past the training length.",
    cost="L·C·H for the lengths, then a number a query and a key",
)
