"""Bands of offsets, by head, outside of which a constant bias table makes all weights negligible.

A query that sees its own position has a logit of at least ``bias[0] - B`` there, B = scale · max‖q‖
· max‖k‖ of the head; a pair at offset Δ has one of at most ``bias[Δ] + B``. So its weight is at
most ``e^(bias[Δ] - bias[0] + 2B)``. Where that is below ``eps / (8 K)``, all such pairs of a query
together weigh less than an eighth of the rounding of the output: they are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.attention.backends.common.fused import are_few
from posenc.attention.problem.record import KernelProblem
from posenc.runtime import has_values

LONG = 2048
"""Fewest keys for which computing the norms of queries and keys pays off."""


def narrowed(x: KernelProblem) -> KernelProblem:
    """The record with each head's band; unchanged if all heads need all offsets."""
    if not _serves(x):
        return x
    bands, all_offsets = _bands(x), x.geometry.highest - x.geometry.lowest
    if int((bands[:, 1] - bands[:, 0]).min()) == all_offsets:
        return x
    return replace(x, geometry=replace(x.geometry, bands=bands))


def _serves(x: KernelProblem) -> bool:
    """True if a constant table is the only term, and queries see their own position."""
    geometry, terms, keys = x.geometry, x.terms, x.k.shape[2]
    if keys < LONG or are_few(x.q) or x.dropout or x.softcap:
        return False
    if geometry.intervals is not None or geometry.period:
        return False
    if x.rotary.query_cosine is not None or not has_values(x.q):
        return False
    # Query i's own position is that of key i - shift.
    if not (geometry.shift <= 0 and x.q.shape[2] - 1 - geometry.shift < keys):
        return False
    bias = terms.bias_by_offset
    return terms.bias_only and not (
        torch.is_grad_enabled() and bias is not None and bias.requires_grad
    )


def _bands(x: KernelProblem) -> Int[Tensor, "H 2"]:
    """Smallest and largest offset with a non-negligible weight, for each head."""
    bias, origin = x.terms.bias_by_offset, x.terms.first
    first, last = x.geometry.lowest, x.geometry.highest
    assert bias is not None
    longest = [y.detach().norm(dim=-1).amax((0, 2)).double() for y in (x.q, x.k)]
    of_keys = longest[1].repeat_interleave(x.q.shape[1] // x.k.shape[1])
    most = 2 * x.scale * longest[0] * of_keys
    precision = torch.finfo(torch.promote_types(x.q.dtype, torch.float32)).eps
    limit = math.log(precision / 8 / x.k.shape[2])
    shown = bias[:, first - origin : last - origin + 1].detach().double()
    weighs = shown - bias[:, -origin, None] + most.unsqueeze(-1) >= limit  # [H, offsets]
    low, high = (side.int().argmax(-1) for side in (weighs, weighs.flip(-1)))
    return torch.stack([first + low, last - high], dim=-1).int()
