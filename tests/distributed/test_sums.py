"""Running sums over tokens of several ranks, with all pairs written out, in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.distributed.ring import crosses_ties, running_sums
from posenc.distributed.shards import Shards

RANKS, CASES = 3, 30


@dataclass
class Alone:
    """A rank whose sums over all ranks are given, and its own kept."""

    rank: int
    given: Tensor | None = None
    own: list[Tensor] = field(default_factory=list)

    def sum(self, x: Tensor) -> Tensor:
        self.own.append(x)
        return x if self.given is None else self.given


def draw(number: int, *, ties: bool) -> tuple[Shards, list[Layout], Tensor]:
    """Layouts of all ranks' tokens and of each rank, and the tokens' ranks.

    Args:
        ties: whether tokens of one document and order may be on several ranks.
    """
    dice = random.Random(number)
    rows, length = dice.choice([1, 2]), dice.randint(RANKS, 14)
    meeting = ties and dice.random() < 0.3
    documents = 3 if meeting else dice.choice([1, 1, 3])

    def whole(low: int, high: int) -> Tensor:
        return torch.tensor([[dice.randint(low, high) for _ in range(length)] for _ in range(rows)])

    owner = torch.tensor([dice.randrange(RANKS) for _ in range(length)]).sort().values
    # Without ties, ranks have orders of their own.
    order = whole(-2, dice.choice([9, 99])) if ties else RANKS * whole(-2, 3) + owner
    document, valid = whole(0, documents - 1), None
    if meeting:  # a document begins at the order that the one before ends at
        order = document.argsort(dim=1).argsort(dim=1) - document
    if dice.random() < 0.5:
        valid = whole(0, 3) > 0
        order = order.where(valid, 0)
    layout = Layout(
        torch.zeros(1, length, 1), order, document=None if documents == 1 else document, valid=valid
    )
    lengths = tuple(int((owner == rank).sum()) for rank in range(RANKS))
    begins = [sum(lengths[:rank]) for rank in range(RANKS)]
    parts = [layout.slice(at, at + n) for at, n in zip(begins, lengths, strict=True)]
    return Shards(lengths, layout, None, layout), parts, owner


def fields(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Order, document and visibility of tokens ``[B, L]``."""
    zeros = torch.zeros_like(layout.order)
    document = zeros if layout.document is None else layout.document
    return layout.order, document, zeros == 0 if layout.valid is None else layout.valid


@pytest.mark.parametrize("number", range(CASES))
def test_sums_are_those_of_pairs(number: int) -> None:
    torch.manual_seed(number)
    shards, parts, _ = draw(number, ties=False)
    signal = torch.randn(2, shards.layout.length, 2, requires_grad=True)
    signals = signal.split(shards.lengths, dim=1)

    def run(given: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        groups: list[Any] = [Alone(rank, given) for rank in range(RANKS)]
        placed = [
            layout._with({"signal": part}) for layout, part in zip(parts, signals, strict=True)
        ]
        sums = [
            running_sums(group, shards, layout)
            for group, layout in zip(groups, placed, strict=True)
        ]
        return torch.cat(sums, dim=1), [group.own[0] for group in groups]

    got, _ = run(torch.stack(run(None)[1]).sum(0))
    order, document, valid = fields(shards.layout)
    before = (order.unsqueeze(1) <= order.unsqueeze(2)) & (
        document.unsqueeze(1) == document.unsqueeze(2)
    )
    expected = (before & valid.unsqueeze(1)).double() @ signal.double()
    real = valid.unsqueeze(-1)
    torch.testing.assert_close(got * real, expected * real)


@pytest.mark.parametrize("number", range(CASES))
def test_ties_between_ranks_are_found(number: int) -> None:
    shards, _, owner = draw(number, ties=True)
    order, document, valid = fields(shards.layout)
    pairs = valid.unsqueeze(1) & valid.unsqueeze(2) & (owner != owner.unsqueeze(1))
    for x in (order, document):
        pairs = pairs & (x.unsqueeze(1) == x.unsqueeze(2))
    assert crosses_ties(shards) == bool(pairs.any())
