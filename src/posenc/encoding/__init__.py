"""Encodings, their abstract parts and the structured forms they lower to."""

from posenc.encoding.encoding import Encoding
from posenc.encoding.lowered import (
    BucketedTerms,
    LowRank,
    Pairing,
    Rotation,
    StructuredScore,
    TokenTableProduct,
)
from posenc.encoding.parts import (
    EmbeddingEncoding,
    Part,
    QueryKeyTransform,
    ScoreTerm,
    ValueTerm,
)

__all__ = [
    "BucketedTerms",
    "EmbeddingEncoding",
    "Encoding",
    "LowRank",
    "Pairing",
    "Part",
    "QueryKeyTransform",
    "Rotation",
    "ScoreTerm",
    "StructuredScore",
    "TokenTableProduct",
    "ValueTerm",
]
