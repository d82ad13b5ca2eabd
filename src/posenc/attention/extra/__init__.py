"""Other forms of attention: linear, complex-valued, and other scoring functions."""

from posenc.attention.extra.complex import ComplexProduct, attend_complex
from posenc.attention.extra.linear import FEATURES, FeatureMap, LinearAttention, attend_linear
from posenc.attention.extra.scoring import (
    Additive,
    Bilinear,
    Dot,
    MultiHeadScoring,
    ScaledDot,
    ScoringFunction,
    within_lengths,
)
from posenc.attention.prefix_sums import LinearState
from posenc.attention.softmax import masked_softmax

__all__ = [
    "FEATURES",
    "Additive",
    "Bilinear",
    "ComplexProduct",
    "Dot",
    "FeatureMap",
    "LinearAttention",
    "LinearState",
    "MultiHeadScoring",
    "ScaledDot",
    "ScoringFunction",
    "attend_complex",
    "attend_linear",
    "masked_softmax",
    "within_lengths",
]
