"""Attention with any positional encoding.

Four floors: the interface (``api``, ``module``, ``cache``) validates a call; the choice (``call``,
``dispatch``, ``trial``) takes the first backend, in the order that its rules give, whose ``plan``
supports it; ``problem`` says what the call is, once for all engines; ``backends`` compute values
and gradients.
"""

from posenc.attention.api import Explanation, attend, explain
from posenc.attention.backends.common.base import Backend, Plan, Refusal
from posenc.attention.cache import Cache, LayerCache
from posenc.attention.dispatch import BACKENDS
from posenc.attention.extra.complex import attend_complex
from posenc.attention.extra.linear import LinearAttention, attend_linear
from posenc.attention.latent import LatentAttention
from posenc.attention.module import Attention, Context
from posenc.attention.prefix_sums import LinearState
from posenc.attention.problem.problem import Problem

__all__ = [
    "BACKENDS",
    "Attention",
    "Backend",
    "Cache",
    "Context",
    "Explanation",
    "LatentAttention",
    "LayerCache",
    "LinearAttention",
    "LinearState",
    "Plan",
    "Problem",
    "Refusal",
    "attend",
    "attend_complex",
    "attend_linear",
    "explain",
]
