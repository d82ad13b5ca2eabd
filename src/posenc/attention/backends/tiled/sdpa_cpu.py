"""PyTorch's fused CPU kernel on a part of the keys, with the sums that let parts be joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.operands import put_reversed, reversed_rows
from posenc.attention.flash_cpu import flash_backward, flash_forward


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the keys.

    Args:
        output: ``[B, H, R, E]``.
        lse: ``[B, H, R]``, logarithm of the sum of exponentiated logits; -inf where nothing is
            seen.
    """

    output: Float[Tensor, "B H R E"]
    lse: Float[Tensor, "B H R"]

    @classmethod
    def nothing(cls, q: Float[Tensor, "B H R D"], width: int) -> Partial:
        """Of queries that see no key."""
        output = q.new_zeros(*q.shape[:3], width)
        return cls(output, q.new_full(q.shape[:3], -torch.inf))

    def part(self, batch: int, heads: tuple[int, int]) -> Partial:
        """The same memory for some heads of one batch row."""
        row = slice(batch, batch + 1)
        return Partial(self.output[row, slice(*heads)], self.lse[row, slice(*heads)])

    def block(self, begin: int, end: int) -> Partial:
        """Of queries counted from the last one, reversed."""
        return Partial(*(reversed_rows(x, begin, end) for x in (self.output, self.lse)))

    def put(self, begin: int, end: int, part: Partial) -> None:
        """Write them back."""
        put_reversed(self.output, begin, end, part.output)
        put_reversed(self.lse, begin, end, part.lse)


def sdpa_cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Partial:
    """Softmax of ``q·k + mask`` over these keys, applied to their values."""
    return Partial(*flash_forward(q, k, v, mask))


def sdpa_cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these keys, given the output and LSE over all keys."""
    return flash_backward(gradient, q, k, v, whole.output, whole.lse, mask)


def join(parts: list[Partial]) -> Partial:
    """Attention over the keys of all parts together."""
    if len(parts) == 1:
        return parts[0]
    all_lse = torch.stack([part.lse for part in parts])  # [parts, B, H, R]
    lse = torch.logsumexp(all_lse, dim=0)  # [B, H, R]
    weights = (all_lse - lse.masked_fill(lse == -torch.inf, 0.0)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, lse)
