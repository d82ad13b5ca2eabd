"""Encodings, their abstract parts and the structured forms they lower to."""

from posenc.encoding.encoding import Encoding
from posenc.encoding.lowered import (
    BucketedTerms,
    DistanceFunction,
    FusedScore,
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
    "DistanceFunction",
    "EmbeddingEncoding",
    "Encoding",
    "FusedScore",
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
