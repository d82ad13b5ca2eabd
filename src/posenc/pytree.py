"""Layouts and grids as pytrees, so that transforms and exported programs take them as arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from posenc.grid import Grid
from posenc.layout import Layout

__all__ = ["register"]

_TENSORS = ("positions", "order", "document", "valid", "special", "signal")
_Context = list[Any]
Node = TypeVar("Node")


def register() -> None:
    """Register ``Layout`` (leaves: its tensors) and ``Grid`` (leaves: its layouts' tensors)."""
    for kind, flatten, unflatten in (
        (Layout, _flatten_layout, _unflatten_layout),
        (Grid, _flatten_grid, _unflatten_grid),
    ):
        pytree.register_pytree_node(
            kind,
            flatten,
            unflatten,
            serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
            to_dumpable_context=list,
            from_dumpable_context=list,
            flatten_with_keys_fn=_with_keys(flatten),
        )


def _with_keys(flatten: Any) -> Any:
    def flatten_with_keys(node: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
        leaves, context = flatten(node)
        return list(zip(map(pytree.GetAttrKey, context[0]), leaves, strict=True)), context

    return flatten_with_keys


def _flatten_layout(layout: Layout) -> tuple[list[Tensor], _Context]:
    names = [name for name in _TENSORS if getattr(layout, name) is not None]
    rest = [field.name for field in fields(Layout) if field.name not in _TENSORS]
    values = [getattr(layout, name) for name in rest]
    values = [list(value) if isinstance(value, tuple) else value for value in values]
    return [getattr(layout, name) for name in names], [names, rest, values]


def _unflatten_layout(leaves: Iterable[Any], context: _Context) -> Layout:
    names, rest, values = context
    tensors: dict[str, Any] = dict.fromkeys(_TENSORS) | dict(zip(names, leaves, strict=True))
    values = [tuple(value) if isinstance(value, list) else value for value in values]
    return _rebuilt(Layout, tensors | dict(zip(rest, values, strict=True)))


def _flatten_grid(grid: Grid) -> tuple[list[Layout], _Context]:
    rest = ["causal", "window"]
    return [grid.query, grid.key], [["query", "key"], rest, [getattr(grid, name) for name in rest]]


def _unflatten_grid(leaves: Iterable[Any], context: _Context) -> Grid:
    names, rest, values = context
    return _rebuilt(Grid, dict(zip([*names, *rest], [*leaves, *values], strict=True)))


def _rebuilt(kind: type[Node], fields: dict[str, Any]) -> Node:
    """An instance made without its checks: leaves may be anything, such as a mapping's results."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
