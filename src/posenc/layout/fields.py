"""Fields of layouts and grids: joined where tokens follow one another, registered as pytrees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from posenc.errors import ArgumentError


def require_joinable(first: Any, second: Any) -> None:
    """Require layouts whose tokens can follow one another in each row."""
    if not isinstance(second, type(first)):
        raise ArgumentError(
            "other", expected="a Layout", got=type(second).__name__, remedy="Use Layout.sequence."
        )
    if first.axes != second.axes:
        raise ArgumentError(
            "layout",
            expected=f"{first.axes} axes as in the cached part",
            got=second.axes,
            remedy="Use the same number of axes for all chunks.",
        )
    if (first.signal is None) != (second.signal is None):
        raise ArgumentError(
            "signal",
            expected="a signal on both layouts or on neither",
            got="one on one of them",
            remedy="Call encoding.observe on every chunk before it is cached.",
        )
    if first.batch != second.batch and 1 not in (first.batch, second.batch):
        raise ArgumentError(
            "layout",
            expected=f"{first.batch} rows as in the cached part, or 1",
            got=second.batch,
            remedy="Use the same number of rows for all chunks.",
        )


def join(first: Tensor, second: Tensor) -> Tensor:
    """Tokens of two fields one after the other, rows repeated where one has a single row."""
    if first.shape[0] == second.shape[0]:
        return torch.cat([first, second], dim=1)
    rows = max(first.shape[0], second.shape[0])
    parts = [part.expand(rows, *part.shape[1:]) for part in (first, second)]
    return torch.cat(parts, dim=1)


def join_field(first: Any, second: Any, name: str, default: int | bool) -> Tensor | None:
    """A field of two layouts, ``default`` where only one has it; None where neither does."""
    values: list[Tensor | None] = [getattr(first, name), getattr(second, name)]
    if all(value is None for value in values):
        return None
    dtype = torch.bool if isinstance(default, bool) else torch.int64
    filled = [
        torch.full_like(side.order, default, dtype=dtype) if value is None else value
        for side, value in zip((first, second), values, strict=True)
    ]
    return join(*filled)


_Context = list[Any]


def register(kind: type[Any], name: str, children: tuple[str, ...]) -> None:
    """Register a dataclass as a pytree.

    Args:
        kind: the dataclass.
        name: its name in exported programs.
        children: fields that hold tensors or other nodes, or None; all others are constants.
    """

    def flatten(node: Any) -> tuple[list[Any], _Context]:
        names = [child for child in children if getattr(node, child) is not None]
        rest = [field.name for field in fields(kind) if field.name not in children]
        values = [getattr(node, field) for field in rest]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        return [getattr(node, child) for child in names], [names, rest, values]

    def flatten_with_keys(node: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
        leaves, context = flatten(node)
        return list(zip(map(pytree.GetAttrKey, context[0]), leaves, strict=True)), context

    def unflatten(leaves: Iterable[Any], context: _Context) -> Any:
        names, rest, values = context
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        node = object.__new__(kind)  # unchecked: leaves may be anything, such as None
        state = dict.fromkeys(children) | dict(
            zip([*names, *rest], [*leaves, *values], strict=True)
        )
        for field, value in state.items():
            object.__setattr__(node, field, value)
        return node

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=name,
        to_dumpable_context=list,
        from_dumpable_context=list,
        flatten_with_keys_fn=flatten_with_keys,
    )
