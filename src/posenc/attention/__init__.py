"""Attention with any positional encoding."""

from posenc.attention.api import BACKENDS, Explanation, attend, explain
from posenc.attention.cache import Cache, LayerCache
from posenc.attention.module import Attention

__all__ = ["BACKENDS", "Attention", "Cache", "Explanation", "LayerCache", "attend", "explain"]
