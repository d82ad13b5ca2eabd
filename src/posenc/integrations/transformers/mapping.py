"""Which tensor of a checkpoint is which tensor of a model: patterns, read in either direction."""

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
    """How a tensor of ours is made of tensors of theirs, and taken apart again.

    Both directions know nothing but shapes, so that ``write`` of an empty tensor says which shapes
    ``read`` expects.

    Args:
        names: patterns of theirs.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    @abstractmethod
    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        """Our tensor, from theirs in the order of ``names``."""

    @abstractmethod
    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        """Their tensors."""


class Stacked(Rule):
    """Tensors of equal shape, the rows of one below those of another."""

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return torch.cat(list(theirs))

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return ours.chunk(len(self.names))


class OneTensor(Rule):
    """The same tensor under another name; in subclasses, in another form."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return self.ours(theirs[0], heads)

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (self.theirs(ours, heads),)

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        """Our form of it."""
        return theirs

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        """Their form of it."""
        return ours


class Transposed(OneTensor):
    """A matrix the other way round."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.mT

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.mT


class Piece(OneTensor):
    """Some rows of theirs, ``[1, n, C]``, whose pieces follow each other in the order of the table.

    Ours is of any shape ``[…, C]`` with as many rows.
    """

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.reshape(1, -1, ours.shape[-1])


class RowsFrom(OneTensor):
    """A tensor without its first rows, which mean nothing."""

    def __init__(self, name: str, first: int) -> None:
        super().__init__(name)
        self.first = first

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs[self.first :]

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return torch.cat([ours.new_zeros(self.first, *ours.shape[1:]), ours])


class SplitByHead(OneTensor):
    """Rows of query, key and value of the first head, of the second, …; ours: all queries first."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return _regroup(theirs, heads, 3)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return _regroup(ours, 3, heads)


class HeadColumns(OneTensor):
    """Theirs ``[C, H, D]``, a projection to heads; ours ``[H·D, C]``, as a linear layer has it."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.flatten(1).mT

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.mT.reshape(ours.shape[1], heads, -1)


class HeadRows(OneTensor):
    """Theirs ``[C, H, D]``, a projection from heads; ours ``[C, H·D]``."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.flatten(1)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.reshape(len(ours), heads, -1)


class HeadsFirst(OneTensor):
    """Theirs ``[C, H, D]``; ours ``[H, D, C]``."""

    def ours(self, theirs: Tensor, heads: int) -> Tensor:
        return theirs.permute(1, 2, 0)

    def theirs(self, ours: Tensor, heads: int) -> Tensor:
        return ours.permute(2, 0, 1)


def _regroup(x: Tensor, outer: int, inner: int) -> Tensor:
    """Rows in ``outer`` groups of ``inner`` groups, grouped the other way round."""
    return x.reshape(outer, inner, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


Table = Mapping[str, str | Rule]
"""Pattern of ours → pattern of theirs, or the rule by which ours is made.

``{layer}`` and ``{block}`` stand for numbers and ``{kind}`` for ``weight`` or ``bias``.
"""

HOLES = {
    "{layer}": r"(?P<layer>\d+)",
    "{block}": r"(?P<block>\d+)",
    "{kind}": r"(?P<kind>weight|bias)",
}


def matches(pattern: str, name: str) -> dict[str, str] | None:
    """What fills the pattern's holes so that it is ``name``; None where nothing does."""
    expression = re.escape(pattern)
    for hole, group in HOLES.items():
        expression = expression.replace(re.escape(hole), group)
    found = re.fullmatch(expression, name)
    return None if found is None else found.groupdict()


@dataclass(frozen=True, eq=False)
class Match:
    """Our tensor and theirs.

    Args:
        name: of ours.
        rule: how it is made of theirs.
        names: of theirs.
        parts: what the rule makes of ours; of the same shapes as theirs, or as their pieces.
    """

    name: str
    rule: Rule
    names: tuple[str, ...]
    parts: Sequence[Tensor]


def match(
    table: Table, tensors: Mapping[str, Tensor], *, heads: int
) -> tuple[list[Match], list[str]]:
    """Our tensors in the order of the table, and the names of those that are in no row of it."""
    found: list[Match] = []
    left = dict(tensors)
    for pattern, row in table.items():
        rule = OneTensor(row) if isinstance(row, str) else row
        for name in list(left):
            holes = matches(pattern, name)
            if holes is None:
                continue
            written = rule.write(left.pop(name), heads)
            names = tuple(theirs.format(**holes) for theirs in rule.names)
            found.append(Match(name, rule, names, written))
    return found, list(left)


def join(found: Iterable[Match]) -> dict[str, Tensor]:
    """Their tensors by name, pieces put together."""
    joined: dict[str, Tensor] = {}
    for each in found:
        for name, part in zip(each.names, each.parts, strict=True):
            joined[name] = torch.cat([joined[name], part], dim=1) if name in joined else part
    return joined
