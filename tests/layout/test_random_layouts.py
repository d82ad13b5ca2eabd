"""Layouts and grids made at random, held to loops over single tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pytest
import torch

from posenc.grid import FARTHEST, Grid
from posenc.layout import Layout


class Token(NamedTuple):
    position: tuple[float, ...]
    order: int
    document: int
    valid: bool
    special: bool


Rows = list[list[Token]]


def tokens(layout: Layout, rows: int) -> Rows:
    def listed(name: str, default: object) -> list[list[Any]]:
        x = getattr(layout, name)
        if x is None:
            return [[default] * layout.length] * rows
        assert len(x) in (1, rows)
        made: list[list[Any]] = x.expand(rows, *x.shape[1:]).tolist()
        return made

    defaults = {"positions": 0, "order": 0, "document": 0, "valid": True, "special": False}
    columns = [listed(name, default) for name, default in defaults.items()]
    return [
        [Token(tuple(at), *others) for at, *others in zip(*row, strict=True)]
        for row in zip(*columns, strict=True)
    ]


def some_layout(dice: random.Random, rows: int) -> Layout:
    length, start = dice.choice([1, 2, 5, 9]), dice.choice([-3, 0, 4, 2**24 - 3])
    lengths = [dice.randint(0, length) for _ in range(rows)]
    prefix, side = dice.choice([0, 0, 2]), dice.choice(["left", "right"])
    kind = dice.choice(["sequence", "packed", "padded", "mask", "times"])
    if kind == "packed":
        return Layout.packed([dice.randint(1, length) for _ in range(3)])
    if kind == "padded":
        return Layout.padded(lengths, length, side=side, prefix=prefix)
    if kind == "mask":
        return Layout.from_attention_mask(torch.tensor([[dice.random() < 0.7] * length]))
    if kind == "times":
        return Layout.at(torch.tensor([dice.uniform(-9, 9) for _ in range(length)]))
    return Layout.sequence(length, start, prefix=prefix)


def require_claims(layout: Layout) -> None:
    """The constructor, which reads the values, takes what the layout claims of them."""
    again = Layout(**{field.name: getattr(layout, field.name) for field in fields(layout)})
    assert (again.start, again.extent, again.consecutive) == (
        *(layout.start, layout.extent, layout.consecutive),
    )


def changed(dice: random.Random, layout: Layout, rows: int) -> tuple[Layout, Rows]:
    """Another layout made of this one, and its tokens."""
    known = tokens(layout, rows)
    how = dice.choice(["slice", "slice", "select", "concat", "concat", "following", "double"])
    if how == "slice":
        begin, end = (dice.randint(-layout.length - 2, layout.length + 2) for _ in range(2))
        return layout.slice(begin, end), [row[begin:end] for row in known]
    if how == "select":
        index = [dice.randrange(rows) for _ in range(rows)]
        return layout.select(torch.tensor(index)), [known[row] for row in index]
    if how == "concat":
        other = some_layout(dice, rows)
        if layout.start is not None and dice.random() < 0.5:
            other = Layout.sequence(3, layout.start + layout.length + dice.choice([0, 0, 1]))
        joined = zip(known, tokens(other, rows), strict=True)
        return layout.concat(other), [[*row, *more] for row, more in joined]
    if how == "following" and layout.length:
        lasts = [row[-1] for row in known]
        return layout.following(), [[after(last)] for last in lasts]
    return replace(layout, positions=layout.positions.double()), known


def after(last: Token) -> Token:
    at = tuple(x + 1 for x in last.position)
    return Token(at, last.order + 1, last.document, valid=True, special=False)


def visible(grid: Grid, rows: int) -> Iterator[list[list[bool]]]:
    lowest, highest = grid.band
    ends = None if grid.intervals is None else grid.intervals.expand(rows, -1, -1).tolist()
    for row, (queries, keys) in enumerate(
        zip(tokens(grid.query, rows), tokens(grid.key, rows), strict=True)
    ):
        yield [
            [
                lowest <= key.order - query.order <= highest
                and query.document == key.document
                and query.valid
                and key.valid
                and (ends is None or ends[row][i][0] <= key.order < ends[row][i][1])
                for key in keys
            ]
            for i, query in enumerate(queries)
        ]


@pytest.mark.parametrize("number", range(150))
def test_random_layouts_are_lists_of_tokens(number: int) -> None:
    dice = random.Random(number)
    rows = dice.choice([1, 2, 3])
    layout = some_layout(dice, rows)
    for _ in range(4):
        layout, expected = changed(dice, layout, rows)
        assert tokens(layout, rows) == expected
        require_claims(layout)


@pytest.mark.parametrize("number", range(150))
def test_random_grids_show_what_loops_show(number: int) -> None:
    dice = random.Random(number)
    rows = dice.choice([1, 2])
    key = some_layout(dice, rows)
    query = dice.choice([key, key.slice(dice.randrange(key.length), key.length)])
    if dice.random() < 0.3:
        query = some_layout(dice, rows)
    ends = sorted(dice.choice([None, -3, 0, 1, 2]) or 0 for _ in range(2))
    bands: list[Any] = [None, 1, 3, 2**63, (None, ends[1]), (ends[0], None), tuple(ends)]
    window = dice.choice(bands)
    grid = Grid(query, key, dice.random() < 0.5, window)
    if dice.random() < 0.4:
        size = dice.choice([1, 3, 4])
        grid = grid.chunked(size)
        if dice.random() < 0.5:
            first = query.order - dice.choice([0, 2])
            grid = grid.within(torch.stack([first, first + 3], dim=-1))
    elif query is key and query.document is None and dice.random() < 0.5:
        require_blocks(dice, grid, rows)
    shown = grid.visible.expand(rows, -1, -1, -1)[:, 0]
    assert shown.tolist() == list(visible(grid, rows))
    known = grid.shift is not None and not grid.segmented
    assert grid.dense == shown.all() if known else shown.all() or not grid.dense
    pairs = [torch.arange(n) for n in (rows, 1, *shown.shape[1:])]
    b, h, i, j = torch.meshgrid(*pairs, indexing="ij")
    assert grid.mask_mod()(b, h, i, j)[:, 0].equal(shown)
    begin = dice.randrange(query.length)
    assert (
        grid.slice(begin, query.length)
        .visible.expand(rows, -1, -1, -1)[:, 0]
        .equal(shown[:, begin:])
    )
    if grid.shift is not None:
        offsets = grid.distinct_offsets()
        index = torch.arange(key.length) - torch.arange(query.length).unsqueeze(1)
        assert (offsets[index + query.length - 1] == grid.offset[0, ..., 0]).all()


def require_blocks(dice: random.Random, grid: Grid, rows: int) -> None:
    """Tokens of one block see each other, too, wherever both are valid."""
    if not (grid.band[0] <= 1 and grid.band[1] >= -1):
        return
    length = grid.query.length
    blocks = torch.tensor([sorted(dice.choice([-1, 0, 0, 1]) for _ in range(length))])
    valid = torch.tensor([[token.valid for token in row] for row in tokens(grid.key, rows)])
    same = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] >= 0)
    both = valid[:, :, None] & valid[:, None]
    expected = grid.visible[:, 0] | (same & both)
    assert bool((grid.with_blocks(blocks).visible[:, 0] == expected).all())


def test_no_limit_is_no_limit() -> None:
    assert Grid.of(Layout.sequence(2), window=(-FARTHEST, None)).band == (-FARTHEST, FARTHEST)
