"""Rounding in other places than the definition's, which may be without it by chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from posenc.attention import softmax as softmaxes
from posenc.attention.softmax import masked_softmax


def nudged(x: Tensor, unit: float, seed: int) -> Tensor:
    """``x``, each number off by ``unit`` of its size, up or down at random."""
    dice = torch.Generator().manual_seed(seed)
    return x * (1 + unit * _signs(x, dice))


@contextmanager
def rounded_logits(unit: float, seed: int) -> Iterator[None]:
    """The definition's logits and their gradients are off by ``unit`` of their size at random.

    Gradients are ``w (dW - Σ w dW)`` of weights w. The summands are each off: where a query sees
    one key, they cancel, and that is all there is.
    """
    dice = torch.Generator().manual_seed(seed)

    def softmax(logits: Tensor, visible: Tensor) -> Tensor:
        logits = logits + unit * _signs(logits, dice) * logits.detach().nan_to_num(0.0, 0.0, 0.0)
        weights = masked_softmax(logits, visible)
        sizes: list[Tensor] = []

        def rounded(gradient: Tensor) -> Tensor:
            w, size = weights.detach(), sizes.pop()
            part = w * (size + (w * size).sum(-1, keepdim=True))
            return gradient + unit * _signs(w, dice) * part

        if logits.requires_grad:
            weights.register_hook(lambda gradient: sizes.append(gradient.abs()))
            logits.register_hook(rounded)
        return weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmaxes, "masked_softmax", softmax)
        yield


def _signs(like: Tensor, dice: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(2, like.shape, generator=dice).to(like.dtype) - 1
