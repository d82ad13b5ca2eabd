"""Positional encodings for Transformers: exact, in every model, at the speed of attention."""

from posenc.attention import Attention, Cache, attend, explain
from posenc.encoding import (
    EmbeddingEncoding,
    Encoding,
    QueryKeyTransform,
    ScoreTerm,
    ValueTerm,
)
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create, create_layers

__all__ = [
    "ENCODINGS",
    "Attention",
    "Cache",
    "EmbeddingEncoding",
    "Encoding",
    "Grid",
    "Layout",
    "QueryKeyTransform",
    "ScoreTerm",
    "ValueTerm",
    "attend",
    "create",
    "create_layers",
    "explain",
]
