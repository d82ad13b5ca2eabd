"""Attention with any positional encoding."""

from posenc.attention.api import BACKENDS, Explanation, attend, explain
from posenc.attention.cache import Cache, LayerCache
from posenc.attention.complex import attend_complex
from posenc.attention.module import Attention, Context

__all__ = [
    "BACKENDS",
    "Attention",
    "Cache",
    "Context",
    "Explanation",
    "LayerCache",
    "attend",
    "attend_complex",
    "explain",
]
