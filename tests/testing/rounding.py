"""Rounding where gradients of logits cancel, which the definition may be without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from posenc.attention.backends.common import definition
from posenc.attention.softmax import masked_softmax


@contextmanager
def rounded_logits(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """The definition rounds its gradients of logits as a dtype does, whatever it computes in.

    They are ``w (dW - Σ w dW)`` of weights w. The summands are each off by one unit at random:
    where a query sees one key, they cancel, and that is all there is.
    """
    dice = torch.Generator().manual_seed(seed)
    unit = torch.finfo(dtype).eps

    def softmax(logits: Tensor, visible: Tensor) -> Tensor:
        weights = masked_softmax(logits, visible)
        sizes: list[Tensor] = []

        def rounded(gradient: Tensor) -> Tensor:
            w, size = weights.detach(), sizes.pop()
            signs = 2.0 * torch.randint(2, w.shape, generator=dice) - 1
            return gradient + unit * signs * w * (size + (w * size).sum(-1, keepdim=True))

        if logits.requires_grad:
            weights.register_hook(lambda gradient: sizes.append(gradient.abs()))
            logits.register_hook(rounded)
        return weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(definition, "masked_softmax", softmax)
        yield
