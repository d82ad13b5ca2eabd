"""Context parallelism: sequences spread over the ranks of a mesh, with any encoding.

``attend`` is ``posenc.attend`` of shards. Layouts carry positions with the tokens, so that a shard
is nothing but some tokens; ``contiguous`` and ``balanced`` say which.
"""

from posenc.distributed.api import FORMS, ContextParallel, FormExplanation, attend, sum_gradients
from posenc.distributed.models import parallelize
from posenc.distributed.shards import balanced, contiguous, take

__all__ = [
    "FORMS",
    "ContextParallel",
    "FormExplanation",
    "attend",
    "balanced",
    "contiguous",
    "parallelize",
    "sum_gradients",
    "take",
]
