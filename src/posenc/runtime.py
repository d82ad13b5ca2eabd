"""How the current call runs: traced, under autocast, under function transforms, or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

__all__ = ["differentiates_forward", "has_values", "is_transformed", "without_autocast"]


def has_values(x: Tensor) -> bool:
    """Whether ``x`` has values that Python may read.

    False for meta and fake tensors, and while ``torch.compile`` or ``torch.export`` traces, where
    reading would break the graph.
    """
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operands keep their dtypes; the meta device has no autocast to leave."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def differentiates_forward() -> bool:
    """True inside ``torch.func.jvp``, ``jacfwd``, ``hessian`` and ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """True inside any transform of ``torch.func`` and inside ``forward_ad.dual_level``.

    Fused operators know reverse mode alone: under ``jvp``, ``jacfwd`` or dual numbers a derivative
    of theirs would be zero without a word, and ``vmap`` has no rule for them.
    """
    return torch._C._are_functorch_transforms_active() or differentiates_forward()
