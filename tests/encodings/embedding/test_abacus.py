"""Places of digits, counted by hand and by loops over texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posenc import Layout
from posenc.attention import LayerCache
from posenc.encoding import Encoding
from posenc.encodings.embedding.abacus import Abacus
from posenc.errors import ArgumentError, LengthError


def ids(*texts: str) -> Tensor:
    return torch.tensor([list(text.encode()) for text in texts])


def places(text: str, layout: Layout | None = None) -> list[int]:
    layout = Layout.sequence(len(text)) if layout is None else layout
    found: list[int] = Abacus(dim=1).place(ids(text), layout)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("21+43=64", [1, 2, 0, 1, 2, 0, 1, 2]),
        ("12345", [1, 2, 3, 4, 5]),
        ("a7 9b", [0, 1, 0, 1, 0]),
        ("x", [0]),
        ("1", [1]),
    ],
)
def test_places_by_hand(text: str, expected: list[int]) -> None:
    assert places(text) == expected


def test_equals_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(6, (4, 40), generator=generator)
    encoding = Abacus(dim=3, digits=(0, 1, 3, 5)).eval()
    x = torch.randn(4, 40, 3)
    got = encoding(x, Layout.sequence(40), tokens=tokens)
    for b in range(4):
        place = 0
        for i in range(40):
            place = place + 1 if int(tokens[b, i]) in (0, 1, 3, 5) else 0
            torch.testing.assert_close(got[b, i], x[b, i] + encoding.table[place])


def test_a_number_ends_with_its_document() -> None:
    assert places("12345", Layout.packed([2, 3])) == [1, 2, 1, 2, 3]


@pytest.mark.parametrize(
    ("side", "expected"), [("left", [0, 0, 1, 2, 3]), ("right", [1, 2, 3, 0, 0])]
)
def test_padding_is_no_digit(side: str, expected: list[int]) -> None:
    layout = Layout.padded([3], 5, side=side)
    assert places("11111", layout) == expected


def test_the_offset_is_shared_by_all_digits_and_drawn_in_training_only() -> None:
    torch.manual_seed(0)
    encoding = Abacus(dim=1, places=4, offset=6).requires_grad_(False)
    encoding.table.copy_(torch.arange(11.0).unsqueeze(1))
    tokens, seen = ids("12+3", "+345"), set()
    for _ in range(200):
        rows = encoding(torch.zeros(2, 4, 1), Layout.sequence(4), tokens=tokens)[..., 0].tolist()
        shift = int(rows[0][0]) - 1
        assert rows == [[1 + shift, 2 + shift, 0, 1 + shift], [0, *(n + shift for n in (1, 2, 3))]]
        seen.add(shift)
    assert seen == set(range(7))
    encoding.eval()
    rows = encoding(torch.zeros(2, 4, 1), Layout.sequence(4), tokens=tokens)[..., 0].tolist()
    assert rows == [[1, 2, 0, 1], [0, 1, 2, 3]]


def test_a_number_cut_by_chunks_goes_on() -> None:
    encoding = Encoding.of(Abacus(dim=2).eval())
    tokens = ids("9+12345678+1", "12345678+123")
    x = torch.randn(2, 12, 2)
    whole = encoding.embed(x, Layout.sequence(12), tokens=tokens)
    cache, parts, start = LayerCache(), [], 0
    for size in (1, 3, 1, 1, 5, 1):
        chunk = slice(start, start + size)
        layout = Layout.sequence(size, start)
        parts.append(cache.embed(encoding, x[:, chunk], layout, tokens=tokens[:, chunk]))
        start += size
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_beams_take_their_numbers_along() -> None:
    encoding, cache = Encoding.of(Abacus(dim=2).eval()), LayerCache()
    zeros = torch.zeros(2, 3, 2)
    cache.embed(encoding, zeros, Layout.sequence(3), tokens=ids("123", "1+2"))
    cache.select(torch.tensor([1, 0]))
    last = cache.embed(encoding, zeros[:, :1], Layout.sequence(1, 3), tokens=ids("4", "4"))
    expected = encoding.embed(zeros, Layout.sequence(3), tokens=ids("+24", "234"))[:, 2]
    torch.testing.assert_close(last[0, 0], expected[0])
    torch.testing.assert_close(last[1, 0], next(encoding.parameters())[4])


def test_a_longer_number_is_refused() -> None:
    encoding = Abacus(dim=1, places=3)
    encoding(torch.zeros(1, 7, 1), Layout.sequence(7), tokens=ids("123+123"))
    with pytest.raises(LengthError, match="3 digits"):
        encoding(torch.zeros(1, 6, 1), Layout.sequence(6), tokens=ids("1+1234"))


def test_needs_tokens() -> None:
    with pytest.raises(ArgumentError, match="tokens"):
        Abacus(dim=1)(torch.zeros(1, 2, 1), Layout.sequence(2))
