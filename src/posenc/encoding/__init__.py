"""Encodings, their abstract parts and the structured forms they lower to."""

from posenc.encoding.encoding import Encoding
from posenc.encoding.parts import (
    EmbeddingEncoding,
    Part,
    QueryKeyTransform,
    ScoreTerm,
    ValueTerm,
)
from posenc.lowered import Gathered, Lowered, LowRank, Pairing, Product, Rotation

__all__ = [
    "EmbeddingEncoding",
    "Encoding",
    "Gathered",
    "LowRank",
    "Lowered",
    "Pairing",
    "Part",
    "Product",
    "QueryKeyTransform",
    "Rotation",
    "ScoreTerm",
    "ValueTerm",
]
