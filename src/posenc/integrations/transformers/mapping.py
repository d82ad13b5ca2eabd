"""Bidirectional mapping between tensors of checkpoints and of models."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "HeadColumns",
    "HeadRows",
    "HeadsFirst",
    "Match",
    "OneTensor",
    "Piece",
    "RowsFrom",
    "Rule",
    "SplitByHead",
    "Stacked",
    "Table",
    "Transposed",
    "join",
    "match",
    "matches",
]


class Rule(ABC):
    """Conversion between a tensor of the model and tensors of the checkpoint.

    Both directions depend on shapes only: ``write`` of a meta tensor gives the shapes that ``read``
    expects.

    Args:
        names: patterns of the checkpoint's names.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    @abstractmethod
    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        """The model's tensor from the checkpoint's, in the order of ``names``."""

    @abstractmethod
    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        """The checkpoint's tensors."""


class Stacked(Rule):
    """Concatenation of the rows of tensors of equal shape."""

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return torch.cat(list(theirs))

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return ours.chunk(len(self.names))


class OneTensor(Rule):
    """The same tensor under another name; subclasses convert it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return self.ours(theirs[0], heads)

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (self.theirs(ours, heads),)

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        """The model's form of it."""
        return theirs

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        """The checkpoint's form of it."""
        return ours


class Transposed(OneTensor):
    """A transposed matrix."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.mT

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.mT


class Piece(OneTensor):
    """Some rows of a checkpoint tensor ``[1, n, C]``, consecutive in the order of the table.

    The model's tensor is ``[…, C]`` with as many rows.
    """

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.reshape(1, -1, ours.shape[-1])


class RowsFrom(OneTensor):
    """A tensor without its first rows, which are unused."""

    def __init__(self, name: str, first: int) -> None:
        super().__init__(name)
        self.first = first

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs[self.first :]

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return torch.cat([ours.new_zeros(self.first, *ours.shape[1:]), ours])


class SplitByHead(OneTensor):
    """Rows of query, key and value of each head in turn; in the model all queries come first."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return _regroup(theirs, heads, 3)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return _regroup(ours, 3, heads)


class HeadColumns(OneTensor):
    """A projection to heads, ``[C, H, D]`` in the checkpoint, ``[H·D, C]`` in the model."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.flatten(1).mT

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.mT.reshape(ours.shape[1], heads, -1)


class HeadRows(OneTensor):
    """A projection from heads, ``[C, H, D]`` in the checkpoint, ``[C, H·D]`` in the model."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.flatten(1)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.reshape(len(ours), heads, -1)


class HeadsFirst(OneTensor):
    """``[C, H, D]`` in the checkpoint, ``[H, D, C]`` in the model."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.permute(1, 2, 0)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.permute(2, 0, 1)


def _regroup(x: Tensor, outer: int, inner: int) -> Tensor:
    """Rows in ``outer`` groups of ``inner`` groups, transposed to ``inner`` of ``outer``."""
    return x.reshape(outer, inner, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


Table = Mapping[str, str | Rule]
"""Pattern of the model's names → pattern of the checkpoint's names, or a rule.

``{layer}`` and ``{block}`` match numbers, ``{kind}`` matches ``weight`` or ``bias``.
"""

HOLES = {
    "{layer}": r"(?P<layer>\d+)",
    "{block}": r"(?P<block>\d+)",
    "{kind}": r"(?P<kind>weight|bias)",
}


def matches(pattern: str, name: str) -> dict[str, str] | None:
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
        rule = OneTensor(row) if isinstance(row, str) else row
        for name in list(left):
            holes = matches(pattern, name)
            if holes is None:
                continue
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
