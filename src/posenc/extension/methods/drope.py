"""DroPE."""

from __future__ import annotations

from posenc.encoding import Encoding
from posenc.entry import Citation
from posenc.extension.entry import Extension, ExtensionClaims
from posenc.extension.fitting import replaced, require_rope

__all__ = ["drope"]


def drope(encoding: Encoding) -> Encoding:
    """DroPE: rope is dropped after training, and the model recalibrated without it.

    What remains tells positions by the causal mask alone, as NoPE does. Recalibration is a short
    further training at the trained length, which is the caller's to do (the paper spends 0.5 to 2
    % of the tokens of training): before it the model knows nothing of order. Cost: less than
    none. The paper's scaling of logits past the trained length is joined as ``"drope+log_n"``, with
    a logarithm of another slope.

    Args:
        encoding: with rope (stretched or not); queries should see the past only.

    Raises:
        ArgumentError: when it has no rope.

    Reference: Gelberg et al. 2025, "Extending the Context of Pretrained LLMs by Dropping Their
    Positional Embeddings".

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
    claims=ExtensionClaims(
        identity_at_one=False,
        training="needed",
        expect="Useless before recalibration; after it the length matters less.",
    ),
    citation=Citation(
        authors="Gelberg et al.",
        title="Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings",
        year=2025,
        url="https://arxiv.org/abs/2512.12167",
    ),
)
