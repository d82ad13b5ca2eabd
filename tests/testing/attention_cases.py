"""Random calls of ``attend`` for ``attention_fuzz``."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from posenc.layout import Layout
from posenc.registry import ENCODINGS
from posenc.testing.subject import fold

MAX_LENGTH = 700
"""Longest sequence drawn, and ``max_length`` of the encodings."""

WRONG = ("heads", "head_dim", "causal", "key_width", "axes", "length", "dtype")
"""Kinds of invalid arguments."""

LAYOUTS = ("sequence", "sequence", "cross", "packed", "padded", "gaps", "times")
"""Kinds of texts."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The values that cases are drawn from.

    Args:
        longest: bounds of the lengths; None for ``MAX_LENGTH`` in all batch rows together.
        head_dims, value_dims: widths of heads; None for that of the queries.
        batches, kv_heads, groups: batch rows, key heads, and query heads of each.
        dtypes: of the operands.
        layouts: of texts.
        images: share of images, where the encoding has two axes.
        wrong: share of cases with an invalid argument.
        tiles: sides of the kernels' tiles, where they can be chosen.
    """

    longest: tuple[int | None, ...] = (3, 20, 80, 80, 300, None)
    head_dims: tuple[int, ...] = (8, 8, 16, 24)
    value_dims: tuple[int | None, ...] = (None, None, None, 5, 32)
    batches: tuple[int, ...] = (1, 1, 2, 3)
    kv_heads: tuple[int, ...] = (1, 2, 3)
    groups: tuple[int, ...] = (1, 2, 4)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    layouts: tuple[str, ...] = LAYOUTS
    images: float = 0.6
    wrong: float = 0.15
    tiles: tuple[int, ...] = (16,)


WIDE = Sizes()
"""For backends that are fast on the CPU."""

INTERPRETED = Sizes(
    longest=(3, 20, 50, 70, 130),
    head_dims=(1, 2, 5, 8, 16, 24, 33, 64, 100, 128),
    value_dims=(None, None, 1, 7, 40, 128),
    batches=(1, 1, 2),
    kv_heads=(1, 2),
    groups=(1, 1, 3),
    dtypes=(torch.float32, torch.float32, torch.bfloat16),
    layouts=("sequence", "sequence", "cross", "packed", "packed", "padded", "padded", "gaps"),
    wrong=0.0,
    tiles=(16, 32, 64),
)
"""For the kernels of the ``triton`` backend, by Triton's interpreter."""


@dataclass(frozen=True)
class AttentionCase:
    """One random call of ``attend``.

    Args:
        number: random seed of the case.
        name: of the encoding.
        batch, heads, kv_heads, head_dim, value_dim: sizes.
        queries, keys: layouts, not yet observed by the encoding.
        causal, window: of the grid.
        dtype: float64 or float32.
        frozen: the encoding's parameters require no gradient.
        memory: memory layout of the operands.
        wrong: the invalid argument, or None.
        tile: sides of the kernels' tiles, of queries and of keys.
    """

    number: int
    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    queries: Layout
    keys: Layout
    causal: bool
    window: int | None
    dtype: torch.dtype
    frozen: bool
    memory: str
    wrong: str | None
    tile: tuple[int, int] = (16, 16)

    def __str__(self) -> str:
        wrong = "" if self.wrong is None else f", wrong {self.wrong}"
        return (
            f"case {self.number}: {self.name}, batch {self.batch}, heads {self.heads}/"
            f"{self.kv_heads} of {self.head_dim}/{self.value_dim}, {self.queries.length}×"
            f"{self.keys.length} tokens on {self.keys.axes} axes, causal={self.causal}, "
            f"window={self.window}, {self.dtype}, frozen={self.frozen}, {self.memory}, "
            f"tiles of {self.tile[0]}×{self.tile[1]}{wrong}"
        )


def draw(number: int, names: list[str], sizes: Sizes = WIDE) -> AttentionCase:
    """The case with this number."""
    dice = random.Random(number)
    name = dice.choice(names)
    claims = ENCODINGS[name].claims
    axes = dice.choice(claims.axes or (1, 2, 3))
    causal = claims.causal_only or dice.random() < 0.5
    kv_heads = dice.choice(sizes.kv_heads)
    head_dim = dice.choice(sizes.head_dims)
    batch = dice.choice(sizes.batches)
    longest = dice.choice(sizes.longest) or MAX_LENGTH // batch
    queries, keys = _layouts(dice, batch, longest, axes, sizes)
    return AttentionCase(
        number=number,
        name=name,
        batch=batch,
        heads=kv_heads * dice.choice(sizes.groups),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=dice.choice(sizes.value_dims) or head_dim,
        queries=queries,
        keys=keys,
        causal=causal,
        window=dice.choice([None, None, None, 1, 7, 70]),
        dtype=dice.choice(sizes.dtypes),
        frozen=dice.random() < 0.3,
        memory=dice.choice(["contiguous", "transposed", "strided", "offset", "expanded"]),
        wrong=dice.choice(WRONG) if dice.random() < sizes.wrong else None,
        tile=(dice.choice(sizes.tiles), dice.choice(sizes.tiles)),
    )


def _layouts(
    dice: random.Random, batch: int, longest: int, axes: int, sizes: Sizes
) -> tuple[Layout, Layout]:
    """Layouts of queries and keys as models use them."""
    length = dice.randint(1, longest)
    if axes == 2 and dice.random() < sizes.images:
        return _image_layouts(dice, batch, max(1, int(length**0.5)))
    kind = dice.choice(sizes.layouts)
    if kind == "cross":
        keys = Layout.sequence(dice.randint(1, longest), start=dice.randint(0, 5))
        queries = Layout.sequence(length, start=dice.randint(0, 9))
        return fold(queries, axes), fold(keys, axes)
    if kind == "packed":
        cuts = [dice.randint(1, max(1, length)) for _ in range(dice.randint(1, 4))]
        keys = Layout.packed(cuts)
    elif kind == "padded":
        lengths = [dice.randint(0, length) for _ in range(batch)]
        keys = Layout.padded(lengths, length, side=dice.choice(["left", "right"]))
    elif kind == "gaps":
        keys = Layout.at(torch.tensor(sorted(dice.sample(range(2 * length), length))))
    elif kind == "times":
        rows = [sorted(dice.uniform(0, length) for _ in range(length)) for _ in range(batch)]
        keys = Layout.at(torch.tensor(rows, dtype=dice.choice([torch.float32, torch.float64])))
    else:
        keys = Layout.sequence(length, start=dice.randint(0, 5))
    keys = fold(keys, axes)
    begin = dice.choice([0, 0, dice.randrange(keys.length)])  # the last ones, as with a cache
    return (keys if begin == 0 else keys.slice(begin, keys.length)), keys


def _image_layouts(dice: random.Random, batch: int, side: int) -> tuple[Layout, Layout]:
    height, width = dice.randint(1, side), dice.randint(1, side + 3)
    valid = None
    if dice.random() < 0.3:
        generator = torch.Generator().manual_seed(dice.randrange(2**31))
        valid = torch.rand(batch, height, width, generator=generator) < 0.8
    keys = Layout.image(height, width, valid=valid, prefix=dice.choice([0, 0, 1]))
    if dice.random() < 0.3:
        return Layout.image(dice.randint(1, side), dice.randint(1, side)), keys
    return keys, keys
