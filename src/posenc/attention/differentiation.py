"""Function transforms around a call: ``torch.func``'s and forward-mode differentiation.

Fused operators know reverse mode alone: under ``jvp``, ``jacfwd`` or dual numbers a derivative of
theirs would be zero without a word, and ``vmap`` has no rule for them.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["differentiates_forward", "is_transformed"]


def differentiates_forward() -> bool:
    """True inside ``torch.func.jvp``, ``jacfwd``, ``hessian`` and ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """True inside any transform of ``torch.func`` and inside ``forward_ad.dual_level``."""
    return torch._C._are_functorch_transforms_active() or differentiates_forward()
