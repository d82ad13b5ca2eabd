"""Hierarchical decomposition against the source's equation in loops."""

from __future__ import annotations

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.hierarchical import Hierarchical


@pytest.mark.parametrize("alpha", [0.4, 0.2, 0.9])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_equals_loops(alpha: float, count: int) -> None:
    encoding = Hierarchical(dim=3, max_length=count, alpha=alpha).requires_grad_(False)
    table = encoding.table.double()
    base = [(table[i] - alpha * table[0]) / (1 - alpha) for i in range(count)]
    got = encoding(torch.zeros(1, count**2, 3), Layout.sequence(count**2))
    for i in range(count):
        for j in range(count):
            expected = alpha * base[i] + (1 - alpha) * base[j]
            torch.testing.assert_close(got[0, i * count + j].double(), expected)


def test_trained_positions_keep_their_rows() -> None:
    encoding = Hierarchical(dim=4, max_length=7)
    x = torch.zeros(1, 49, 4)
    torch.testing.assert_close(encoding(x, Layout.sequence(49))[0, :7], encoding.table)
    torch.testing.assert_close(encoding(x[:, :7], Layout.sequence(7))[0], encoding.table)


def test_parts_have_the_rows_of_the_whole_across_the_trained_length() -> None:
    encoding, x = Hierarchical(dim=4, max_length=7), torch.zeros(1, 49, 4)
    whole = encoding(x, Layout.sequence(49))
    for begin, end in [(0, 6), (0, 7), (0, 8), (6, 7), (6, 8), (7, 8), (8, 9), (3, 10)]:
        part = encoding(x[:, begin:end], Layout.sequence(end - begin, begin))
        torch.testing.assert_close(part, whole[:, begin:end])


def test_a_number_by_hand() -> None:
    # n = 2, α = 0.4, p = (0, 6): u = (0, 10), so q = (0, 6, 4, 10).
    encoding = Hierarchical(dim=1, max_length=2).requires_grad_(False)
    encoding.table.copy_(torch.tensor([[0.0], [6.0]]))
    out = encoding(torch.zeros(1, 4, 1), Layout.sequence(4)).flatten()
    assert out.tolist() == pytest.approx([0.0, 6.0, 4.0, 10.0])


def test_all_positions_differ_unless_alpha_is_a_half() -> None:
    out = Hierarchical(dim=4, max_length=6)(torch.zeros(1, 36, 4), Layout.sequence(36))[0]
    assert len(out.detach().round(decimals=6).unique(dim=0)) == 36
