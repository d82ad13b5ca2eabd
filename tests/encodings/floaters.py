"""FLOATER with weights that matter, and how often its dynamics is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posenc.encodings.embedding.floater import Floater, Flow


def make(*, dim: int = 6, noise: float = 0.4, **options: Any) -> Floater:
    """One with weights that matter."""
    torch.manual_seed(5)
    encoding = Floater(dim=dim, **({"unit": 0.3} | options)).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(noise * torch.randn(parameter.shape))
    return encoding


def count_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that gets one longer with each evaluation of the dynamics."""
    calls: list[object] = []

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            calls.append(None)
            return plain(*inputs)

        return counted

    monkeypatch.setattr(Flow, "slope", counting(Flow.slope))
    return calls
