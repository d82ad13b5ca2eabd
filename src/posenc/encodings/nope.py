"""No positional encoding."""

from __future__ import annotations

from posenc.encoding import Encoding, Entry


def nope() -> Encoding:
    """NoPE: no positional encoding; token order is available through the causal mask only.

    ``s_ij = scale · q_i·k_j``.

    Differs from the paper in nothing. Bidirectional NoPE is permutation-equivariant; causal NoPE
    with two or more layers is not.

    Reference: Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still
    Learn Positional Information", https://arxiv.org/abs/2203.16634; Kazemnejad et al. 2023.

    >>> import posenc
    >>> posenc.create("nope").parts()
    ()
    """
    return Encoding()


ENTRY = Entry(
    factory=nope,
    summary="No positional encoding; order comes from the causal mask alone.",
    sites=(),
    relative=True,
    axes=None,
    trainable=False,
    extrapolates="Degrades slowly past the training length.",
    cost="none",
    sharing="layers",
)
