"""Bidirectional mapping between tensors of checkpoints and of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """Conversion between a tensor of the model and tensors of the checkpoint.

    Both directions depend on shapes only: ``write`` of a meta tensor gives the shapes that ``read``
    expects.

    Args:
        names: patterns of the checkpoint's names.
        read: from the checkpoint's tensors, in this order, and the number of heads to the model's.
        write: from the model's tensor and the number of heads to the checkpoint's.
        piece: the checkpoint's tensor ``[1, n, C]`` is a sequence of such pieces, in the order of
            the table.
    """

    names: tuple[str, ...]
    read: Callable[[Sequence[Tensor], int], Tensor]
    write: Callable[[Tensor, int], Sequence[Tensor]]
    piece: bool = False


Conversion = Callable[[Tensor, int], Tensor]
"""From a tensor and the number of heads to a tensor."""


def _same(x: Tensor, heads: int) -> Tensor:
    return x


def converted(
    name: str, read: Conversion = _same, write: Conversion = _same, *, piece: bool = False
) -> Rule:
    """One tensor of the checkpoint, converted in both directions."""
    return Rule(
        (name,), lambda x, heads: read(x[0], heads), lambda x, heads: (write(x, heads),), piece
    )


def stacked(*names: str) -> Rule:
    """Concatenation of the rows of tensors of equal shape."""
    return Rule(names, lambda x, heads: torch.cat(list(x)), lambda x, heads: x.chunk(len(names)))


def transposed(name: str) -> Rule:
    """A transposed matrix."""
    return converted(name, lambda x, heads: x.mT, lambda x, heads: x.mT)


def piece(name: str) -> Rule:
    """Consecutive rows of a tensor ``[1, n, C]``; the model's tensor is ``[…, C]``."""
    return converted(name, write=lambda x, heads: x.reshape(1, -1, x.shape[-1]), piece=True)


def rows_from(name: str, first: int) -> Rule:
    """A tensor without its first rows, which are unused."""

    def write(x: Tensor, heads: int) -> Tensor:
        return torch.cat([x.new_zeros(first, *x.shape[1:]), x])

    return converted(name, lambda x, heads: x[first:], write)


def split_by_head(name: str) -> Rule:
    """Rows of query, key and value of each head in turn; in the model all queries come first."""

    def regroup(x: Tensor, outer: int, inner: int) -> Tensor:
        return x.reshape(outer, inner, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    return converted(
        name, lambda x, heads: regroup(x, heads, 3), lambda x, heads: regroup(x, 3, heads)
    )


def head_columns(name: str) -> Rule:
    """A projection to heads, ``[C, H, D]`` in the checkpoint, ``[H·D, C]`` in the model."""

    def write(x: Tensor, heads: int) -> Tensor:
        return x.mT.reshape(x.shape[1], heads, -1)

    return converted(name, lambda x, heads: x.flatten(1).mT, write)


def head_rows(name: str) -> Rule:
    """A projection from heads, ``[C, H, D]`` in the checkpoint, ``[C, H·D]`` in the model."""
    return converted(
        name, lambda x, heads: x.flatten(1), lambda x, heads: x.reshape(len(x), heads, -1)
    )


def heads_first(name: str) -> Rule:
    """``[C, H, D]`` in the checkpoint, ``[H, D, C]`` in the model."""
    return converted(name, lambda x, heads: x.permute(1, 2, 0), lambda x, heads: x.permute(2, 0, 1))


Table = Mapping[str, str | Rule]
"""Pattern of the model's names → pattern of the checkpoint's names, or a rule.

``{layer}`` and ``{block}`` match numbers, ``{kind}`` matches ``weight`` or ``bias``, ``{input}``
``query``, ``key`` or ``value``.
"""

HOLES = {
    "{layer}": r"(?P<layer>\d+)",
    "{block}": r"(?P<block>\d+)",
    "{kind}": r"(?P<kind>weight|bias)",
    "{input}": r"(?P<input>query|key|value)",
}


def fits(pattern: str, name: str) -> dict[str, str] | None:
    """Values of the pattern's fields that give ``name``; None if it does not match."""
    expression = re.escape(pattern)
    for hole, group in HOLES.items():
        expression = expression.replace(re.escape(hole), group)
    matched = re.fullmatch(expression, name)
    return None if matched is None else matched.groupdict()


@dataclass(frozen=True, eq=False)
class Match:
    """A model tensor and its checkpoint tensors.

    Args:
        name: of the model's tensor.
        rule: the conversion.
        names: of the checkpoint's tensors.
        parts: the converted tensor, with the shapes of the checkpoint's tensors or pieces.
    """

    name: str
    rule: Rule
    names: tuple[str, ...]
    parts: Sequence[Tensor]


def match(
    table: Table, tensors: Mapping[str, Tensor], *, heads: int
) -> tuple[list[Match], list[str]]:
    """The model's tensors in the order of the table, and the names without a rule."""
    matched: list[Match] = []
    left = dict(tensors)
    for pattern, row in table.items():
        rule = converted(row) if isinstance(row, str) else row
        for name in list(left):
            holes = fits(pattern, name)
            if holes is not None:
                written = rule.write(left.pop(name), heads)
                names = tuple(theirs.format(**holes) for theirs in rule.names)
                matched.append(Match(name, rule, names, written))
    return matched, list(left)


def join(matched: Iterable[Match]) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, with pieces joined."""
    joined: dict[str, Tensor] = {}
    for item in matched:
        for name, part in zip(item.names, item.parts, strict=True):
            joined[name] = torch.cat([joined[name], part], dim=1) if name in joined else part
    return joined
