"""How the current call runs: traced or not, under autocast or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["has_values", "without_autocast"]


def has_values(x: Tensor) -> bool:
    """Whether ``x`` has values that Python may read.

    False for meta and fake tensors, and while ``torch.compile`` or ``torch.export`` traces, where
    reading would break the graph.
    """
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operands keep their dtypes; the meta device has no autocast to leave."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
