"""Forgetting attention."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encoding import Entry
from posenc.encodings.common.prefix_sums import GatedDecay


class Forgetting(GatedDecay):
    """FoX: each token scales earlier tokens by a forget gate; ALiBi with data-dependent slopes.

    ``s_ij += Σ_{t=j+1..i} log f_t``, ``f_t = σ(w_h · x_t + b_h)``.

    x: the layer's input ``[B, L, C]``; f a share in (0, 1) a token and head; the sum is over the
    document's real tokens, by order: ``c_i - c_j`` with running sums c. Positions are not read.
    Differs from the paper in nothing; the paper's "Pro" block (output gates and norms, shifted
    keys) is a matter of the model. With a constant f it is ALiBi of slope -log f.

    Args:
        dim: width C of the layer's input.
        heads: H.

    Raises:
        ArgumentError: when an argument is below 1.

    Reference: Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate",
    https://arxiv.org/abs/2503.02130.

    >>> import posenc, torch
    >>> forgetting = posenc.create("forgetting", dim=64, heads=8)
    >>> forgetting.observe(torch.randn(1, 5, 64), posenc.Layout.sequence(5)).signal.shape
    torch.Size([1, 5, 8])
    """

    def steps(self, gates: Float[Tensor, "B L H"]) -> Float[Tensor, "B L H"]:
        return torch.nn.functional.logsigmoid(gates)


ENTRY = Entry(
    factory=Forgetting,
    summary="Lowers logits by the log forget gates of the tokens between key and query.",
    relative=True,
    trainable=True,
    extrapolates="Holds well past the training length: distant tokens have low weight.",
    cost="L·C·H for the gates, then a number a query and a key",
)
