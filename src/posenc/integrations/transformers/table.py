"""Which tensor of a checkpoint is which tensor of a model: patterns, read in either direction."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rule", "Same", "SplitByHead", "Stacked", "Table", "expand", "matches"]


class Rule(ABC):
    """How a tensor of ours is made of tensors of theirs, and taken apart again.

    Both directions know nothing but shapes, so that ``write`` of an empty tensor says which shapes
    ``read`` expects.
    """

    names: tuple[str, ...]
    """Patterns of theirs."""

    @abstractmethod
    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        """Our tensor."""

    @abstractmethod
    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        """Their tensors."""


@dataclass(frozen=True)
class Same(Rule):
    """The same tensor under another name."""

    names: tuple[str]

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return theirs[0]

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (ours,)


@dataclass(frozen=True, init=False)
class Stacked(Rule):
    """Tensors of equal shape, the rows of one below those of another."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return torch.cat(list(theirs))

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return ours.chunk(len(self.names))


@dataclass(frozen=True, init=False)
class SplitByHead(Rule):
    """Rows of query, key and value of the first head, of the second, …; ours: all queries first."""

    names: tuple[str]

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "names", (name,))

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return _swap(theirs[0], heads, 3)

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (_swap(ours, 3, heads),)


def _swap(x: Tensor, outer: int, inner: int) -> Tensor:
    """Rows in ``outer`` groups of ``inner`` groups, regrouped the other way round."""
    return x.reshape(outer, inner, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


@dataclass(frozen=True, init=False)
class RowsFrom(Rule):
    """A tensor without its first rows, which mean nothing."""

    names: tuple[str]
    first: int

    def __init__(self, name: str, first: int) -> None:
        object.__setattr__(self, "names", (name,))
        object.__setattr__(self, "first", first)

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return theirs[0][self.first :]

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (torch.cat([ours.new_zeros(self.first, *ours.shape[1:]), ours]),)


@dataclass(frozen=True, init=False)
class Transposed(Rule):
    """A matrix the other way round."""

    names: tuple[str]

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "names", (name,))

    def read(self, theirs: Sequence[Tensor], heads: int) -> Tensor:
        return theirs[0].mT

    def write(self, ours: Tensor, heads: int) -> Sequence[Tensor]:
        return (ours.mT,)


Table = Mapping[str, str | Rule]
"""Pattern of ours → pattern of theirs, or the rule that joins several.

``{layer}`` stands for a number and ``{kind}`` for ``weight`` or ``bias``.
"""

HOLES = {"{layer}": r"(?P<layer>\d+)", "{kind}": r"(?P<kind>weight|bias)"}


def matches(pattern: str, name: str) -> dict[str, str] | None:
    """What fills the pattern's holes so that it is ``name``; None where nothing does."""
    expression = re.escape(pattern)
    for hole, group in HOLES.items():
        expression = expression.replace(re.escape(hole), group)
    found = re.fullmatch(expression, name)
    return None if found is None else found.groupdict()


def expand(table: Table, name: str) -> tuple[Rule, tuple[str, ...]] | None:
    """The rule for our tensor ``name``, and their names for it; None where there is no row."""
    for pattern, row in table.items():
        holes = matches(pattern, name)
        if holes is not None:
            rule = Same((row,)) if isinstance(row, str) else row
            return rule, tuple(theirs.format(**holes) for theirs in rule.names)
    return None
