"""Positions of tokens that are drawn at random."""

from __future__ import annotations

import torch

from posenc.lab.experiments.tasks.common.algorithm import random_layout


def test_plain_positions_count() -> None:
    assert random_layout(5, "plain", max_length=9, seed=3).positions.flatten().tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_randomized_positions_are_sorted_distinct_and_in_reach() -> None:
    positions = random_layout(20, "randomized", max_length=100, seed=3).positions.flatten()
    assert (positions.diff() > 0).all()
    assert positions.max() < 100
    assert positions.max() > 40
    others = random_layout(20, "randomized", max_length=100, seed=4).positions.flatten()
    assert not torch.equal(positions, others)


def test_unsorted_positions_keep_the_order_of_tokens() -> None:
    layout = random_layout(20, "unsorted", max_length=100, seed=3)
    positions = layout.positions.flatten()
    assert not (positions.diff() > 0).all()
    assert len(positions.unique()) == 20
    assert (layout.order.diff() > 0).all()


def test_more_tokens_than_reach() -> None:
    assert random_layout(
        9, "randomized", max_length=4, seed=0
    ).positions.flatten().tolist() == list(range(9))
