"""Calls of attention in a pass, recorded by an attention implementation that answers zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class RecordedCall:
    """A call of attention.

    Args:
        module: that called.
        query, key, value: [batch, heads, tokens, features], as they reached attention.
        mask: as it reached attention.
        options: further arguments.
        logits: [heads, queries, keys], of a module that computes attention by itself.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    logits: Tensor | None = None


_CALLS: ContextVar[list[RecordedCall] | None] = ContextVar("calls", default=None)


@contextmanager
def recorded_calls() -> Iterator[list[RecordedCall]]:
    """The calls of ``record_call`` in a context, in order."""
    calls: list[RecordedCall] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def record_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention that answers zeros: so inputs of later layers do not depend on positions."""
    calls = _CALLS.get()
    if calls is not None:
        calls.append(RecordedCall(module, query, key, value, attention_mask, options))
    rows, heads, length, _ = query.shape
    return value.new_zeros(rows, length, heads, value.shape[-1]), None
