"""Types of the tensors that parts take and return; ``posenc.layout.layout`` lists the letters."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.encoding.lowered import StructuredScore
from posenc.runtime import is_exporting

Features = Float[Tensor, "B L C"]
"""Token vectors."""

TokenIds = Int[Tensor, "B L"]
"""Token ids, for methods with a table per token."""

Queries = Float[Tensor, "B H Q D"]
"""Queries of all heads."""

Keys = Float[Tensor, "B G K D"]
"""Keys, of G heads that divide the H of queries."""

Scores = Float[Tensor, "b H Q K"]
"""Terms of the logits, with one batch row if all rows agree."""

Offsets = Float[Tensor, "*dims A"]
"""Offsets Δ = key position − query position, A axes each."""

BucketIndex = Int[Tensor, "*dims"]
"""Bucket of each offset, 0 … N - 1."""

StructuredTerms = tuple[StructuredScore, ...]
"""Structured terms, which are summed."""


def repeat_heads(x: Keys, heads: int) -> Float[Tensor, "B H K D"]:
    """Keys or values of G heads, each repeated for the query heads that share it.

    They are copied where G and ``heads`` differ.
    """
    count = x.shape[1]
    if count == heads:
        return x
    if is_exporting():  # PyTorch before 2.13 bounds the lengths of programs that repeat
        return x[:, torch.arange(heads, device=x.device) * count // heads]
    return x.repeat_interleave(heads // count, dim=1)
