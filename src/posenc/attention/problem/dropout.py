"""Counter-based dropout: the mask depends on the tokens of a pair, not on where they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posenc.layout import Layout

BITS = 24
"""Random bits of a weight."""


@dataclass(frozen=True, eq=False)
class CounterDropout:
    """Counter-based dropout of weights: a hash of batch row, head and both tokens' numbers.

    The mask is the same however tokens and heads are spread over processes.

    Args:
        probability: of dropping a weight.
        seed: of the call.
        query, key: ``[b, Q]`` and ``[b, K]``, numbers of the tokens, see ``token_numbers``.
        first_head: number of the first of these heads among all.
    """

    probability: float
    seed: int
    query: Int[Tensor, "b Q"]
    key: Int[Tensor, "b K"]
    first_head: int = 0

    def rows(self, begin: int, end: int) -> CounterDropout:
        """The dropout of queries ``begin`` to ``end`` (exclusive)."""
        return replace(self, query=self.query[:, begin:end])

    def factors(self, like: Float[Tensor, "B H Q K"]) -> Float[Tensor, "B H Q K"]:
        """0 for dropped weights, 1 / (1 - probability) for others."""
        batch, heads = (
            torch.arange(first, first + count, device=like.device)
            for first, count in ((0, like.shape[0]), (self.first_head, like.shape[1]))
        )
        place = _mix(_mix(batch.unsqueeze(1) + self.seed) + heads)  # [B, H]
        row = _mix(place[:, :, None, None] + self.query[:, None, :, None])
        bits = _mix(row + self.key[:, None, None, :]) & (2**BITS - 1)
        is_kept = bits >= round(self.probability * 2**BITS)
        factors: Tensor = is_kept.to(like.dtype) / (1 - self.probability)
        return factors


def draw_seed(device: torch.device) -> Int[Tensor, "1"]:
    """A seed for a mask, from the generator of PyTorch for a device."""
    return torch.randint(2**31 - 1, (1,), device=device)


def token_numbers(layout: Layout) -> Int[Tensor, "b L"]:
    """A number for each token of a row, by its document and order."""
    if layout.document is None:
        return _mix(layout.order)
    return _mix(_mix(layout.document) + layout.order)


def _mix(x: Int[Tensor, "*dims"]) -> Int[Tensor, "*dims"]:
    """SplitMix64's finaliser, of 64-bit integers that wrap around."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    mixed: Tensor = x ^ _shifted(x, 31)
    return mixed


def _shifted(x: Int[Tensor, "*dims"], bits: int) -> Int[Tensor, "*dims"]:
    """Logical right shift."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
