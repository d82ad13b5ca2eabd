"""Calls of transformers' modules: arguments by name, and recorded calls of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn
from transformers import Cache

CACHE = "cache"
"""Name of a module's cache in posenc."""

CACHES = (CACHE, "past_key_values", "layer_past")
"""Names of a module's cache in transformers; renamed modules still take the old one."""

NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def names_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a method's parameters, in order, without ``self`` and those that collect others."""
    parameters = signature(method).parameters.values()
    return tuple(x.name for x in parameters if x.kind in NAMED and x.name != "self")


def cache_name(names: Iterable[str]) -> str | None:
    """The name among parameters that is the cache's; None if there is none."""
    return next((name for name in names if name in CACHES), None)


def bound(
    names: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a call by name; the cache is ``cache``, whatever it was passed as.

    Args:
        names: parameters of the called method, as from ``names_of``.
    """
    by_name = dict(zip(names[: len(arguments)], arguments, strict=True)) | dict(options)
    if cache_name(names) is None:
        return by_name
    caches = [by_name.pop(name) for name in CACHES if name in by_name]
    if caches:
        by_name[CACHE] = next((cache for cache in caches if cache is not None), None)
    return by_name


def is_cache(value: object) -> bool:
    """True for a cache: once registered for exports, caches are trees of their keys and values."""
    return isinstance(value, Cache)


def caches_in(values: Iterable[Any]) -> Iterator[Cache]:
    """Caches among arguments or outputs; of those with two parts, the one of self-attention."""
    for value in values:
        if isinstance(value, Cache):
            yield getattr(value, "self_attention_cache", value)


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
