"""Encodings, their abstract parts and the structured forms they lower to."""

from posenc.encoding.encoding import Encoding
from posenc.encoding.entry import Entry
from posenc.encoding.lowered import (
    BlockTransforms,
    BucketedTerms,
    DistanceFunction,
    FusedScore,
    GateCounts,
    HeadMixing,
    LogGateSums,
    LowRank,
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
    ValueTransform,
)
from posenc.encoding.rotation import Pairing, RotatedBand, Rotation, apply_rotation
from posenc.encoding.tensors import repeat_heads

__all__ = [
    "BlockTransforms",
    "BucketedTerms",
    "DistanceFunction",
    "EmbeddingEncoding",
    "Encoding",
    "Entry",
    "FusedScore",
    "GateCounts",
    "HeadMixing",
    "LogGateSums",
    "LowRank",
    "Pairing",
    "Part",
    "QueryKeyTransform",
    "RotatedBand",
    "Rotation",
    "ScoreTerm",
    "StickWeights",
    "StructuredScore",
    "TokenTableProduct",
    "ValueTerm",
    "ValueTransform",
    "apply_rotation",
    "repeat_heads",
]
