"""XLNet's form of Transformer-XL's positions."""

from __future__ import annotations

from dataclasses import replace

from posenc.arguments import Base, Count, Width, checked
from posenc.encodings.score.transformer_xl import ENTRY as TRANSFORMER_XL
from posenc.encodings.score.transformer_xl import TransformerXL


@checked
def xlnet(*, dim: Width, heads: Count, head_dim: Width, base: Base = 10000.0) -> TransformerXL:
    """XLNet: the logits of ``transformer_xl`` with vectors u and w of each layer.

    ``s_ij = scale · ((q_i + u_h) · k_j + (q_i + w_h) · W_h r(i - j))``; symbols as there.

    i - j in tokens, signed. Differs from XLNet,
    whose attention also has a term for segments, in holding positions only.

    Args:
        dim: width C of the model; even.
        heads: H.
        head_dim: width D of a head.
        base: ratio of the fastest frequency to the slowest (its limit).

    Raises:
        ArgumentError: when ``dim`` is odd or anything is out of its domain.

    Reference: Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language
    Understanding", https://arxiv.org/abs/1906.08237.

    >>> import posenc
    >>> first, second = posenc.create_layers("xlnet", layers=2, dim=64, heads=4)
    >>> first.score.biases is second.score.biases
    False
    """
    return TransformerXL(dim=dim, heads=heads, head_dim=head_dim, base=base)


ENTRY = replace(
    TRANSFORMER_XL,
    factory=xlnet,
    summary="Transformer-XL's logits with two trained vectors in every layer.",
    citation=None,
    sharing="none",
)
