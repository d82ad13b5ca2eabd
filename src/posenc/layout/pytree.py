"""Registration of layouts and grids as pytrees: arguments of transforms and exported programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch.utils import _pytree as pytree

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
