"""DroPE."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.extension.entry import Extension
from posenc.extension.fitting import replaced, require_rope


def drope(encoding: Encoding) -> Encoding:
    """DroPE: RoPE is removed after training, and the model recalibrated without it.

    What remains depends on order by the causal mask only, as NoPE does. Recalibration is a short
    training at the trained length (0.5 to 2 % of the tokens of training in the paper), left to the
    caller; without it the model is useless. Reduces cost. The paper's scaling of logits is
    ``"drope+log_n"``, with another slope.

    Args:
        encoding: with RoPE (extended or not), for causal attention.

    Raises:
        ArgumentError: if it has no RoPE.

    Reference: Gelberg et al. 2025, "Extending the Context of Pretrained LLMs by Dropping Their
    Positional Embeddings", https://arxiv.org/abs/2512.12167.

    >>> import posenc
    >>> from posenc.extension import drope
    >>> drope(posenc.create("rope", head_dim=8)).parts()
    ()
    """
    return replaced(encoding, require_rope(encoding, "drope"), None)


ENTRY = Extension(
    function=drope,
    summary="Drops rope, to be followed by a short training without it.",
    on=("rope",),
    identity_at_one=False,
    training="needed",
    expect="Useless before recalibration; after it the length matters less.",
)
