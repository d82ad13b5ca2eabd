"""Sums over the tokens between a key and a query, with all pairs written out."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from posenc import Grid, Layout
from posenc.encodings.common.prefix_sums import KeyRanks

CASES = 40


def draw(dice: random.Random, rows: int, *, documents: bool) -> Layout:
    """Tokens in any order with ties, numbers below 0, documents and padding."""
    length = dice.randint(1, 8)

    def whole(low: int, high: int) -> Tensor:
        return torch.tensor([[dice.randint(low, high) for _ in range(length)] for _ in range(rows)])

    return Layout(
        torch.zeros(1, length, 1),
        whole(*dice.choice([(-3, 4), (0, 1)])),
        document=whole(-1, 1) if documents else None,
        valid=whole(0, 3) > 0 if dice.random() < 0.5 else None,
    )


def grid_of(number: int) -> Grid:
    dice = random.Random(number)
    if dice.random() < 0.2:
        return Grid(
            Layout.sequence(4, start=dice.choice([-3, 0, 4, 9])), Layout.sequence(6), causal=True
        )
    rows, documents = dice.choice([(1, 1), (2, 2), (1, 2), (2, 1)]), dice.random() < 0.6
    key = draw(dice, rows[0], documents=documents)
    query = draw(dice, rows[1], documents=documents and dice.random() < 0.9)
    return Grid.of(key, causal=True) if dice.random() < 0.4 else Grid(query, key, causal=True)


@pytest.mark.parametrize("number", range(CASES))
def test_sums_are_those_of_pairs(number: int) -> None:
    torch.manual_seed(number)
    grid = grid_of(number)
    seen, order, keys = grid.visible, grid.key.order, grid.key.length
    index = torch.arange(keys)
    above = (order.unsqueeze(1) > order.unsqueeze(2)).unsqueeze(1)  # [b, 1, j, t]
    level = (order.unsqueeze(1) == order.unsqueeze(2)).unsqueeze(1)
    stored_later = index > index.unsqueeze(-1)
    values = torch.randn(2, 3, 1, keys, dtype=torch.float64)
    scores = torch.randn(2, 3, grid.query.length, keys, dtype=torch.float64) * seen

    ranks = KeyRanks.of(grid)
    until_query, until_key = ranks.running(values.squeeze(2))
    between = until_query.unsqueeze(-1) - until_key.unsqueeze(-2)
    for got, addends, which in (
        (between, values * seen, above),
        (ranks.from_key(scores), scores, above | level),
        (ranks.after_key(scores), scores, above | level & stored_later),
    ):
        expected = (addends.unsqueeze(-2) * which.unsqueeze(2)).sum(-1)
        torch.testing.assert_close(got * seen, expected * seen)
