"""PyTorch's fused CPU kernel on a part of the keys, with the sums that let parts be joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.tiled.operands import put_reversed, reversed_rows
from posenc.errors import ArgumentError

__all__ = ["Partial", "join", "stock_backward", "stock_forward"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over some of the keys.

    Args:
        output: ``[B, H, R, E]``.
        total: ``[B, H, R]``, logarithm of the sum of exponentiated logits; -inf where nothing is
            seen.
    """

    output: Float[Tensor, "B H R E"]
    total: Float[Tensor, "B H R"]

    @classmethod
    def nothing(cls, q: Float[Tensor, "B H R D"], width: int) -> Partial:
        """Of queries that see no key."""
        output = q.new_zeros(*q.shape[:3], width)
        return cls(output, q.new_full(q.shape[:3], -torch.inf))

    def part(self, batch: int, heads: tuple[int, int]) -> Partial:
        """The same memory for some heads of one batch row."""
        row = slice(batch, batch + 1)
        return Partial(self.output[row, slice(*heads)], self.total[row, slice(*heads)])

    def block(self, begin: int, end: int) -> Partial:
        """Of queries counted from the last one, reversed."""
        return Partial(*(reversed_rows(x, begin, end) for x in (self.output, self.total)))

    def put(self, begin: int, end: int, part: Partial) -> None:
        """Write them back."""
        put_reversed(self.output, begin, end, part.output)
        put_reversed(self.total, begin, end, part.total)


def stock_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Partial:
    """Softmax of ``q·k + mask`` over these keys, applied to their values."""
    mask = _check(q, k, v, mask)
    q, k, v = _rows(q), _rows(k), _rows(v)
    return Partial(*_FORWARD(q, k, v, 0.0, False, attn_mask=mask, scale=1.0))


def stock_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these keys, given the output and total over all keys."""
    mask = _check(q, k, v, mask)
    total = whole.total.masked_fill(whole.total == -torch.inf, torch.inf)
    given: tuple[Tensor, Tensor, Tensor] = _BACKWARD(
        *(_rows(x) for x in (gradient, q, k, v, whole.output)),
        total.contiguous(),
        0.0,
        False,
        attn_mask=mask,
        scale=1.0,
    )
    return given


def _rows(x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L D"]:
    """The same with features side by side and tokens apart; the kernel checks no strides."""
    tokens, width = x.shape[-2:]
    features_are = x.stride(-1) == 1 or width == 1
    tokens_are = x.stride(-2) >= width or tokens == 1
    return x if features_are and tokens_are else x.clone(memory_format=torch.contiguous_format)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask, its keys side by side.

    Raises:
        ArgumentError: when operands do not fit together, which the kernel does not check.
    """
    batch, heads, queries, width = q.shape
    wanted = (batch, heads, k.shape[2], width)
    fit = tuple(k.shape) == wanted and tuple(v.shape) == wanted
    if mask is not None:
        pairs = (batch, heads, queries, k.shape[2])
        fit &= all(mine in (1, full) for mine, full in zip(mask.shape, pairs, strict=True))
    if not fit:
        shapes = [list(x.shape) for x in (q, k, v, mask) if x is not None]
        raise ArgumentError(
            "q, k, v and mask",
            expected="operands of one batch size, number of heads and head width",
            got=shapes,
            remedy="Check that the encoding was made for these heads.",
        )
    if mask is None or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1):
        return mask
    return mask.contiguous()


def join(parts: list[Partial]) -> Partial:
    """Attention over the keys of all parts together."""
    if len(parts) == 1:
        return parts[0]
    totals = torch.stack([part.total for part in parts])
    total = torch.logsumexp(totals, dim=0)
    weights = (totals - total.masked_fill(total == -torch.inf, 0.0)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, total)
