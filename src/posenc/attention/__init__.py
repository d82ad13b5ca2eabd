"""Attention with any positional encoding.

``api.attend`` validates a call; ``dispatch.choose`` takes the first backend, in the order that its
rules give, whose ``plan`` supports it; ``backends`` compute values and gradients.
"""

from posenc.attention.api import Explanation, attend, explain
from posenc.attention.backends.common.base import Backend
from posenc.attention.cache import Cache, LayerCache
from posenc.attention.dispatch import BACKENDS
from posenc.attention.extra.complex import attend_complex
from posenc.attention.extra.linear import LinearAttention, attend_linear
from posenc.attention.module import Attention, Context
from posenc.attention.prefix_sums import LinearState

__all__ = [
    "BACKENDS",
    "Attention",
    "Backend",
    "Cache",
    "Context",
    "Explanation",
    "LayerCache",
    "LinearAttention",
    "LinearState",
    "attend",
    "attend_complex",
    "attend_linear",
    "explain",
]
