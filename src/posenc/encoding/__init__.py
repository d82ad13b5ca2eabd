"""Encodings, their abstract parts and the structured forms they lower to."""

from posenc.encoding.encoding import Encoding
from posenc.encoding.lowered import (
    BucketedTerms,
    DistanceFunction,
    FusedScore,
    GateCounts,
    LowRank,
    Pairing,
    Rotation,
    StickWeights,
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
    "GateCounts",
    "LowRank",
    "Pairing",
    "Part",
    "QueryKeyTransform",
    "Rotation",
    "ScoreTerm",
    "StickWeights",
    "StructuredScore",
    "TokenTableProduct",
    "ValueTerm",
]
