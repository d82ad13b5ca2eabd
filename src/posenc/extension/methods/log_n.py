"""Logits scaled by the logarithm of the length."""

from __future__ import annotations

from posenc.arguments import Positive
from posenc.encoding import Encoding
from posenc.encodings.common.log_factor import Form, LogFactor
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Trained


def log_n(
    encoding: Encoding, *, length: Trained, growth: Positive | None = None, form: Form = "log"
) -> Encoding:
    """Log-n scaling: logits of a query among n > L tokens are multiplied by ``ln n / ln L``.

    ``s_ij → κ_i s_ij``, biases included, with ``κ_i = 1 + growth · ln max(1, n_i / L)``. By
    default ``growth = 1 / ln L``, so that ``κ_i = max(1, ln n_i / ln L)``.

    With a causal mask n_i is ``p_i + 1``, so that decoding equals one pass; otherwise the largest
    key position + 1 of the row or document. ``L`` is ``length`` in tokens. It keeps the entropy of
    attention from growing with the length, and is joined to other methods:
    ``extend(encoding, "rerope+log_n", …)``. Cost: Q·D·H; a constant bias table is no longer
    constant. Differs from the source in nothing. Inkling has the same with a growth of 0.1. Llama
    4's form, in its layers without RoPE, is ``1 + growth · ln(1 + ⌊n_i / L⌋)``, L = 8192 and a
    growth of 0.1: it begins at the last trained position. Ministral 3's has ``⌊p_i / L⌋``. Beam's
    is ``(1 + n_i / L)^growth``, L = 2048 and a growth of 0.1, in its layers without RoPE: it is
    above 1 at trained positions too, so that only a model trained with it should have it.

    Args:
        encoding: any with softmax weights.
        length: L, the trained length.
        growth: of κ where n grows by a factor of e.
        form: ``"log"``, ``"llama4"``, ``"ministral3"`` or ``"beam"``.

    Raises:
        ArgumentError: if the weights are no softmax (stick_breaking), ``length`` is below 2, or
            ``growth`` is not positive.
        UnknownNameError: for another ``form``.

    Reference: Su 2021, "Scale operation of attention from entropy invariance",
    https://kexue.fm/archives/8823; Chiang and Cholak 2022, "Overcoming a Theoretical Limitation of
    Self-Attention".

    >>> import posenc
    >>> from posenc.extension import log_n
    >>> log_n(posenc.create("alibi", heads=4), length=64).score
    ScaledScore(
      (inner): Alibi(heads=4)
      (factor): LogFactor(length=64, growth=None, form='log')
    )
    """
    score = encoding.score
    if score is not None and score.replaces_softmax:
        raise NotApplicable.of("log_n", "weights that are a softmax", encoding)
    return encoding.scaled(LogFactor(length=length, growth=growth, form=form))


ENTRY = Extension(
    function=log_n,
    summary="Multiplies the logits by the logarithm of the length.",
    on=("any",),
    short_unchanged=True,
    stays_relative=False,
    training="none",
    expect="A little better than the same without it, since attention stays as sharp.",
    cost="Q·D·H",
)
