"""Strided views, checked to stay within the tensor that they view."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from posenc.errors import ArgumentError


def strided_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """``x``'s own memory as a tensor of this size, whose element ``(i, j, …)`` is element
    ``offset + i · stride[0] + j · stride[1] + …`` of ``x.flatten()``.

    Args:
        x: contiguous.
        size, stride: of the view, stride in elements and not negative.
        offset: the element of ``x`` that comes first.

    Raises:
        ArgumentError: when ``x`` is not contiguous, or the view would read outside it.
    """
    if not x.is_contiguous():
        raise ArgumentError(
            "x",
            expected="a contiguous tensor to make a view of",
            got=f"strides {list(x.stride())} for shape {list(x.shape)}",
            remedy="Use x.contiguous().",
        )
    last = offset
    for count, step in zip(size, stride, strict=True):
        last = last + (count - 1) * step
    if offset < 0 or last >= x.numel() or min(stride) < 0:
        raise ArgumentError(
            "size",
            expected=f"a view within the {x.numel()} elements of a tensor of {list(x.shape)}",
            got=f"shape {list(size)} with strides {list(stride)} from element {offset}",
            remedy="Check that the tensors' heads and lengths are those of the grid and encoding.",
        )
    # From a slice, which carries the storage offset: torch.compile cannot trace reading it.
    return x.view(-1)[offset:].as_strided(size, stride)
