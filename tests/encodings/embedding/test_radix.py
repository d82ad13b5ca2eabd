"""Digits of positions against Python's own arithmetic."""

from __future__ import annotations

import pytest
import torch

from posenc import Layout
from posenc.encodings.embedding.radix import Radix, places


@pytest.mark.parametrize("join", ["sum", "concatenate"])
@pytest.mark.parametrize("base", [2, 7, 10])
def test_equals_loops(base: int, join: str) -> None:
    encoding = Radix(dim=6, base=base, digits=3, join=join).requires_grad_(False)  # type: ignore[arg-type]
    count = base**3
    got = encoding(torch.zeros(1, count, 6), Layout.sequence(count))[0]
    for position in range(count):
        parts, rest = [], position
        for place in range(3):
            parts.append(encoding.tables[place, rest % base])
            rest //= base
        expected = sum(parts) if join == "sum" else torch.cat(parts)
        torch.testing.assert_close(got[position], expected)


def test_fractions_lie_between_their_neighbours() -> None:
    encoding = Radix(dim=4, base=10, digits=2).requires_grad_(False)
    at = Layout.at(torch.tensor([9.0, 9.25, 10.0]))
    low, between, high = encoding(torch.zeros(1, 3, 4), at)[0]
    torch.testing.assert_close(between, 0.75 * low + 0.25 * high)


def test_digits_by_hand() -> None:
    encoding = Radix(dim=4, base=10, digits=4)
    assert encoding.digits_of(torch.tensor([1234.0])).tolist() == [[4, 3, 2, 1]]


@pytest.mark.parametrize(
    ("count", "base", "digits"),
    [(1, 10, 1), (10, 10, 1), (11, 10, 2), (1000, 10, 3), (1001, 10, 4), (2**30, 2, 30)],
)
def test_places_are_exact_at_powers(count: int, base: int, digits: int) -> None:
    assert places(count, base) == digits


def test_as_many_digits_as_max_length_needs() -> None:
    assert Radix(dim=4, max_length=101).places == 3
    assert Radix(dim=4).places == 4
