"""The memory that a module's parameters would take, known before they are allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable

import torch
from torch import nn

from posenc.errors import ArgumentError

__all__ = ["require_room"]

ROOMY, LONG = 2**25, 2**13
"""Sizes whose product and whose largest are below these are not looked at more closely."""

GIB = 2**30


def require_room(make: Callable[[], object], sizes: Iterable[tuple[str, int]]) -> None:
    """Refuse to make a module that could not be trained within the machine's memory.

    Where ``sizes`` are large, ``make`` is called on the meta device, which allocates nothing.

    Args:
        make: makes the module.
        sizes: names and values of the integers among its arguments.

    Raises:
        ArgumentError: naming the largest size.
    """
    sizes = [(name, size) for name, size in sizes if size > 1]
    large = math.prod(size for _, size in sizes) >= ROOMY or any(size >= LONG for _, size in sizes)
    if not large or torch.get_default_device().type == "meta":
        return
    limit = _memory() // 4  # gradients and an optimiser's two moments take as much each
    try:
        with torch.device("meta"):
            module = make()
        needed = _bytes(module) if isinstance(module, nn.Module) else 0
    except (OverflowError, MemoryError, RuntimeError):
        # Sizes whose product is beyond 64 bits cannot even be described.
        needed = None
    if needed is not None and needed <= limit:
        return
    name, size = max(sizes, key=lambda named: named[1])
    amount = "more than can be counted" if needed is None else f"{needed / GIB:,.0f} GiB"
    raise ArgumentError(
        name,
        expected=f"parameters that fit into {limit / GIB:,.0f} GiB of memory",
        got=f"{size:,}, with which they take {amount}",
        remedy="Use smaller sizes.",
    )


def _bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _memory() -> int:
    """Bytes of physical memory; a terabyte where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**40
