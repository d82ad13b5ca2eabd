"""Random calls of ``attend`` for ``attention_fuzz``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from posenc.encoding.entry import Entry
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS
from posenc.testing.subject import fold
from tests.support.guarded import FORMS
from tests.testing import extended_rope, random_parts

MAX_LENGTH = 700
"""Longest sequence drawn, and ``max_length`` of the encodings."""

WRONG = ("heads", "head_dim", "causal", "key_width", "axes", "length", "dtype")
"""Kinds of invalid arguments."""

LAYOUTS = (
    *("sequence", "sequence", "cross", "few", "packed", "padded", "gaps", "times"),
    *("holes", "mixed"),
)
"""Kinds of texts: ``holes`` are padding anywhere, ``mixed`` are documents that interleave."""

EDGES = (4, 8, 16, 32, 64, 128, 192, 256, 512)
"""Numbers of tokens at which vectors, tiles and blocks of kernels end."""

GRADED = ("", "", "", "", "q", "k", "v", "qk", "xs")
"""Operands that require gradients, as in ``attention_fuzz``; none named for all."""

RANDOM = "random"
"""Name of an encoding of random parts."""

EXTENDED = "extended"
"""Name of RoPE extended by a random method."""

METHODS: Mapping[str, Entry] = {
    **ENCODINGS,
    RANDOM: random_parts.ENTRY,
    EXTENDED: extended_rope.ENTRY,
}
"""Entries that cases are drawn from."""

OPTIONS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "axial_rope": {"pairing": ("half",), "across_heads": (True,), "origin": (0.5,), "step": (2.0,)},
    "contextual": {"max_distance": (3,)},
    "cope": {"max_count": (5, 20)},
    "dape": {"bias": ("alibi",), "hidden": (7,)},
    "deberta": {"max_distance": (7, 40), "buckets": (None, 16)},
    "decomposed2d": {"size": (30, 30)},
    "fire": {"hidden": (9,), "threshold": (20.0,)},
    "grape_additive": {"width": (18,)},
    "irpe": {
        "method": ("product", "cross", "euclidean", "quantised"),
        "on": ("k", "q", "qkv"),
        "mode": ("bias", "contextual"),
        "shared_heads": (False, True),
    },
    "path": {"rank": (6,)},
    "rope": {"pairing": ("adjacent",), "fraction": (0.5,)},
    "shaw": {"max_distance": (2, 5)},
    "stick_breaking": {"remainder": ("none",)},
    "t5": {"buckets": (8, 16), "max_distance": (12,)},
}
"""Options other than the defaults, of which some are drawn."""

FAR = (2**31 - 100, 2**31 - 1, 2**32, 2**40)
"""Positions about which 32-bit integers end, and beyond."""

UNBOUNDED = ("alibi", "dape", "dynamic_bias")
"""Encodings whose logits are as large as the distance: far apart, they are all rounding."""

ORDERS = ("permuted", "tied", "stepped", "moved", "moved", "moved")
"""Orders that are not positions; by those of one side ``moved`` tokens stay one step apart."""

INTERVALS = ("chunks", "blocks", "free")
"""Ways to make intervals of keys."""

WIDEST = (2**31, 2**62, 2**63 - 1, 10**30)
"""Windows that hide nothing."""

MANY: Mapping[str, Mapping[str, object]] = {
    RANDOM: {},
    "contextual": {"max_distance": 900},
    "cope": {},
    "deberta": {"max_distance": 2000},
    "fire": {},
    "forgetting": {},
    "grape_additive": {},
    "shaw": {"max_distance": 900},
    "stick_breaking": {},
    "t5": {"buckets": 512, "max_distance": 3000},
    "transformer_xl": {},
}
"""Encodings whose kernels carry something from tile to tile of the keys, with options of many
buckets."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The values that cases are drawn from.

    Args:
        longest: bounds of the lengths; None for ``MAX_LENGTH`` in all batch rows together.
        head_dims, value_dims: widths of heads; None for that of the queries.
        batches, kv_heads, groups: batch rows, key heads, and query heads of each.
        dtypes: of the operands.
        layouts: of texts.
        many: share of cases with more keys than the kernels hold products of at once.
        far, orders, wide: shares of texts with far positions, with an order that is not the
            position, and with float64 positions.
        images: share of images, where the encoding has two axes.
        wrong: share of cases with an invalid argument.
        tiles: sides of the kernels' tiles, where they can be chosen.
        optional: share of options of encodings that are not the defaults.
        repeated: share of cases that repeat a call without gradients.
        foreign: padding holds NaN and infinities, positions and some operands alone have gradients,
            and logits have another scale.
        narrow: parameters are in half precision where operands are.
    """

    longest: tuple[int | None, ...] = (3, 20, 80, 80, 300, None)
    head_dims: tuple[int, ...] = (8, 8, 16, 24)
    value_dims: tuple[int | None, ...] = (None, None, None, 5, 32)
    batches: tuple[int, ...] = (1, 1, 2, 3)
    kv_heads: tuple[int, ...] = (1, 2, 3)
    groups: tuple[int, ...] = (1, 2, 4)
    dtypes: tuple[torch.dtype, ...] = (
        *((torch.float64, torch.float32) * 3),
        *(torch.bfloat16, torch.float16),
    )
    layouts: tuple[str, ...] = LAYOUTS
    foreign: bool = True
    many: float = 0.06
    far: float = 0.15
    orders: float = 0.25
    wide: float = 0.3
    images: float = 0.6
    wrong: float = 0.15
    tiles: tuple[int, ...] = (16,)
    optional: float = 0.4
    repeated: float = 0.25
    narrow: bool = False


WIDE = Sizes()
"""For backends that are fast on the CPU."""

BFLOAT16 = replace(
    WIDE,
    head_dims=(32, 40, 64, 96),
    value_dims=(None, None, 5, 64),
    dtypes=(torch.bfloat16,),
    wrong=0.0,
)
"""For kernels by tile registers, which take whole vectors of features, and not."""

INTERPRETED = Sizes(
    longest=(3, 20, 50, 70, 130),
    head_dims=(1, 2, 5, 8, 16, 24, 33, 64, 100, 128),
    value_dims=(None, None, 1, 7, 40, 128),
    batches=(1, 1, 2),
    kv_heads=(1, 2),
    groups=(1, 1, 3),
    dtypes=(torch.float32, torch.float32, torch.bfloat16),
    layouts=("sequence", "cross", "one", "packed", "packed", "padded", "padded", "gaps", "times"),
    many=0.0,
    wrong=0.0,
    tiles=(16, 32, 64),
    repeated=0.2,
    narrow=True,
)
"""For the kernels of the ``triton`` backend, by Triton's interpreter."""


DRAWN_FORMS = [form for form in FORMS if form != "negated"]
"""All but that of the other sign, which the kernel that rotates operands reads as it lies."""


@dataclass(frozen=True)
class AttentionCase:
    """One random call of ``attend``.

    Args:
        number: random seed of the case.
        name: of the encoding.
        batch, heads, kv_heads, head_dim, value_dim: sizes.
        queries, keys: layouts, not yet observed by the encoding.
        causal, window: of the grid.
        intervals: of the grid, made as ``shown`` makes them; None for none.
        dtype: of the operands.
        frozen: the encoding's parameters require no gradient.
        memory: form of the memory of operands, parameters and the output's gradient.
        forms: of queries, keys and values, where each has its own.
        kind: of the layouts.
        options: of the encoding, besides its sample's.
        apart: pieces of keys and blocks of queries are taken at a time, as in long
            texts.
        repeated: the third of calls without gradients, which the second has prepared.
        narrow: parameters are in half precision where operands are; else in float32.
        wrong: the invalid argument, or None.
        tile: sides of the kernels' tiles, of queries and of keys.
        sinks, softcap, scale: of the call; lse: gradients are of the LSE, too. No sinks, cap and
            LSE where the encoding replaces the softmax.
        poisoned: padding holds NaN and infinities, but for the reference.
        graded: operands that require gradients (x: features of signals, s: sinks); "" for all.
        placed: irregular positions require gradients.
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
    window: int | tuple[int | None, int | None] | None
    intervals: str | None
    dtype: torch.dtype
    frozen: bool
    memory: str
    kind: str
    options: Mapping[str, object]
    apart: bool
    wrong: str | None
    tile: tuple[int, int] = (16, 16)
    sinks: bool = False
    softcap: float | None = None
    lse: bool = False
    repeated: bool = False
    narrow: bool = False
    forms: tuple[str, ...] = ()
    scale: float | None = None
    poisoned: bool = False
    graded: str = ""
    placed: bool = False

    @property
    def double(self) -> bool:
        """True if features and positions are float64."""
        dtypes = {self.dtype, self.queries.positions.dtype, self.keys.positions.dtype}
        return dtypes == {torch.float64}

    def __str__(self) -> str:
        sides = f"{self.queries.length}×{self.keys.length} tokens on {self.keys.axes} axes"
        others = [x.name for x in fields(self) if x.name not in ("number", "queries", "keys")]
        shown = ", ".join(f"{name}={getattr(self, name)}" for name in others)
        return f"case {self.number}: {sides}, {shown}"


def draw(number: int, names: list[str], sizes: Sizes = WIDE) -> AttentionCase:
    """The case with this number.

    As many numbers as there are names have each name once, and as many times that as there are
    kinds of texts have each name with each kind.
    """
    dice = random.Random(number)
    carrying = [name for name in names if name in MANY]
    many = bool(carrying) and dice.random() < sizes.many
    turn, index = divmod(number, len(names))  # each name has a turn with each kind of text
    name = dice.choice(carrying) if many else names[index]
    claims = METHODS[name].claims
    axes = 1 if many else dice.choice(claims.axes or (1, 2, 3))
    causal = claims.causal_only or dice.random() < 0.5
    kv_heads = dice.choice(sizes.kv_heads)
    head_dim = dice.choice(sizes.head_dims)
    batch, groups = dice.choice(sizes.batches), dice.choice(sizes.groups)
    longest = dice.choice(sizes.longest) or MAX_LENGTH // batch
    options: Mapping[str, object] = {}
    if many:
        kv_heads, batch, head_dim, groups = 1, 1, 8, min(groups, 2)
        queries, keys, kind = *_many(dice), "many"
        options = MANY[name]
    else:
        kind = sizes.layouts[(turn + index) % len(sizes.layouts)]
        queries, keys, kind = _layouts(dice, name, kind, batch, longest, axes, sizes)
    window = dice.choice([None, None, 1, _number(dice, 90), dice.choice(WIDEST), "band", "band"])
    intervals = dice.choice([None] * 8 + list(INTERVALS))
    case = AttentionCase(
        number=number,
        name=name,
        batch=batch,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=dice.choice(sizes.value_dims) or head_dim,
        queries=queries,
        keys=keys,
        causal=causal,
        window=_band(dice) if window == "band" else window,
        intervals=intervals,
        dtype=dice.choice(sizes.dtypes),
        frozen=dice.random() < 0.3,
        memory=dice.choice(DRAWN_FORMS),
        kind=kind,
        options=options,
        apart=dice.random() < 0.3,
        wrong=dice.choice(WRONG) if dice.random() < sizes.wrong and not many else None,
        tile=(dice.choice(sizes.tiles), dice.choice(sizes.tiles)),
        sinks=dice.random() < 0.3,
        softcap=dice.choice([0.5, 3.0, 50.0]) if dice.random() < 0.3 else None,
        lse=dice.random() < 0.3,
        repeated=dice.random() < sizes.repeated,
        narrow=sizes.narrow,
    )
    if sizes.foreign:
        case = replace(
            case,
            forms=tuple(dice.choices(DRAWN_FORMS, k=3)) if dice.random() < 0.3 else (),
            scale=dice.choice([None, None, None, 0.05, 1.0]),
            poisoned=dice.random() < 0.6,
            graded=dice.choice(GRADED),
            placed=dice.random() < 0.4,
        )
    if many:
        return case
    drawn = OPTIONS.get(name, {}).items()
    others = {option: dice.choice(x) for option, x in drawn if dice.random() < sizes.optional}
    return replace(case, options=others)


def _band(dice: random.Random) -> tuple[int | None, int | None]:
    """A window of unequal sides, which need not hold the query itself."""
    ends = (dice.choice([0, 1, _number(dice, 90)]) * dice.choice([-1, 1]) for _ in range(2))
    low, high = sorted(ends)
    return (None if dice.random() < 0.2 else low), (None if dice.random() < 0.2 else high)


def _number(dice: random.Random, most: int) -> int:
    """A number from 1 to ``most``, at the end of a vector, tile or block as often as anywhere."""
    edges = [edge for edge in EDGES if edge <= most]
    if not edges or dice.random() < 0.5:
        return dice.randint(1, most)
    return min(most, dice.choice(edges) + dice.choice([-1, 0, 1]))


def shown(case: AttentionCase, grid: Grid) -> Grid:
    """The grid with the case's intervals."""
    if case.intervals is None:
        return grid
    if case.intervals == "chunks":
        return grid.chunked(1 + case.number % 40)
    generator = torch.Generator().manual_seed(case.number)
    count = grid.query.length
    if case.intervals == "blocks" and grid.band[0] <= 1 and grid.band[1] >= -1:
        lengths = torch.randint(-3, 4, (2 * case.batch, count), generator=generator)
        return grid.with_blocks(lengths.clamp(min=-1).sort(dim=1).values[: case.batch])
    ends = torch.randint(-20, 90, (case.batch, count, 2), generator=generator)
    if case.number % 2:  # from one key to the end of a tile
        ends[..., 1] = ends[..., 0].clamp(min=0) // 16 * 16 + 16
    return replace(grid, intervals=ends + grid.query.order.unsqueeze(-1) // 2)


def _layouts(
    dice: random.Random, name: str, kind: str, batch: int, longest: int, axes: int, sizes: Sizes
) -> tuple[Layout, Layout, str]:
    """Layouts of queries and keys as models use them, and all about their kind."""
    length = _number(dice, longest)
    if axes == 2 and dice.random() < sizes.images:
        return *_image_layouts(dice, batch, max(1, int(length**0.5))), "image"
    queries, keys = _texts(dice, kind, batch, length, longest)
    queries, keys = _changed(queries, keys, lambda layout, _: fold(layout, axes), together=True)
    far = partial(_far, apart=name not in UNBOUNDED)
    for share, change in ((sizes.orders, _reordered), (sizes.far, far), (sizes.wide, _wide)):
        if dice.random() < share:
            queries, keys, how = change(dice, queries, keys)
            kind += f", {how}"
    return queries, keys, kind


def _texts(
    dice: random.Random, kind: str, batch: int, length: int, longest: int
) -> tuple[Layout, Layout]:
    if kind == "cross":
        count = _number(dice, longest)
        keys = Layout.sequence(count, start=dice.randint(0, 5))
        if dice.random() < 0.3:
            keys = _padded(dice, batch, count)
        return Layout.sequence(length, start=dice.choice([0, 9, count, -length // 2])), keys
    if kind == "one":
        keys = Layout.sequence(length, start=dice.randint(0, 5))
        return keys.slice(length - 1, length), keys
    if kind == "few":
        return _among(dice, Layout.sequence(longest), dice.randint(1, max(1, longest // 8)))
    if kind == "packed":
        cuts = [dice.randint(1, max(1, length)) for _ in range(dice.randint(1, 4))]
        keys = Layout.packed(cuts)
    elif kind == "padded":
        keys = _padded(dice, batch, length)
    elif kind == "holes":
        rows = dice.choice([1, batch])
        keys = Layout.from_attention_mask(_some(dice, (rows, length), dice.choice([0.2, 0.9])))
    elif kind == "mixed":
        keys = _mixed(dice, batch, length)
    elif kind == "gaps":
        keys = Layout.at(torch.tensor(sorted(dice.sample(range(2 * length), length))))
    elif kind == "times":
        rows = [sorted(dice.uniform(0, length) for _ in range(length)) for _ in range(batch)]
        keys = Layout.at(torch.tensor(rows, dtype=dice.choice([torch.float32, torch.float64])))
    else:
        keys = Layout.sequence(length, start=dice.choice([0, dice.randint(0, 5), -length // 2]))
    begin = dice.choice([0, 0, dice.randrange(keys.length)])  # the last ones, as with a cache
    end = keys.length if dice.random() < 0.8 else dice.randint(begin + 1, keys.length)
    return (keys if end - begin == keys.length else keys.slice(begin, end)), keys


def _padded(dice: random.Random, batch: int, length: int) -> Layout:
    lengths = [dice.choice([0, length, dice.randint(0, length)]) for _ in range(batch)]
    return Layout.padded(lengths, length, side=dice.choice(["left", "right"]))


def _some(dice: random.Random, shape: tuple[int, int], share: float) -> torch.Tensor:
    """True for about this share of the tokens."""
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    return torch.rand(shape, generator=generator) < share


def _mixed(dice: random.Random, batch: int, length: int) -> Layout:
    """Documents in each row, in one piece or in several, and padding between them."""
    rows = dice.choice([1, batch])
    document = _some(dice, (rows, length), dice.choice([0.05, 0.5])).long().cumsum(1)
    if dice.random() < 0.5:
        document = document.remainder(dice.choice([2, 3]))
    if dice.random() < 0.5:  # later documents come first
        document = document.flip(1)
    places = torch.arange(length).expand(rows, -1)
    first = places.where(document.diff(dim=1, prepend=document[:, :1] - 1) != 0, 0).cummax(1)[0]
    return Layout(
        (places - first).float().unsqueeze(-1),
        places[:1],
        document=document,
        valid=_some(dice, (rows, length), 0.8) if dice.random() < 0.4 else None,
    )


def _many(dice: random.Random) -> tuple[Layout, Layout]:
    """More keys than the kernels hold products of at once, with blocks of queries."""
    length = dice.randint(1100, 2600)
    keys = dice.choice([Layout.sequence(length), Layout.packed([90, length - 90])])
    return _among(dice, keys, dice.choice([20, 140, 300]))


def _among(dice: random.Random, keys: Layout, count: int) -> tuple[Layout, Layout]:
    """Some queries anywhere among the keys."""
    last = keys.length - count
    begin = dice.choice([0, dice.randint(0, last), last, last])
    return keys.slice(begin, begin + count), keys


def _reordered(dice: random.Random, queries: Layout, keys: Layout) -> tuple[Layout, Layout, str]:
    """The same positions in another order."""
    kind, offset = dice.choice(ORDERS), dice.randint(-9, 9)

    def change(layout: Layout, mine: bool) -> Layout:
        order = layout.order
        if kind == "permuted":
            order = torch.tensor([dice.sample(row, len(row)) for row in order.tolist()])
        elif kind == "tied":
            order = order // 2
        elif kind == "stepped":
            order = 3 * order
        elif mine:
            order = order + offset
        return replace(layout, order=order, start=None, consecutive=False)

    return *_changed(queries, keys, change, together=kind != "moved"), kind


def _far(
    dice: random.Random, queries: Layout, keys: Layout, *, apart: bool
) -> tuple[Layout, Layout, str]:
    """Both sides far from 0, or, if ``apart``, one alone."""
    sides, by = dice.choice([(True, True), (True, False), (False, True)]), dice.choice(FAR)
    sides = sides if apart else (True, True)

    def change(layout: Layout, mine: bool) -> Layout:
        moved = by if sides[not mine] else 0
        start = None if layout.start is None else layout.start + moved
        positions, order = layout.positions.double() + moved, layout.order + moved
        return replace(layout, positions=positions, order=order, start=start)

    return *_changed(queries, keys, change, together=all(sides)), f"far {by}"


def _wide(dice: random.Random, queries: Layout, keys: Layout) -> tuple[Layout, Layout, str]:
    """The same in float64."""

    def change(layout: Layout, mine: bool) -> Layout:
        return replace(layout, positions=layout.positions.double())

    return *_changed(queries, keys, change, together=True), "float64"


def _changed(
    queries: Layout, keys: Layout, change: Callable[[Layout, bool], Layout], *, together: bool
) -> tuple[Layout, Layout]:
    """Both sides changed; one layout stays one if ``together``."""
    if queries is keys and together:
        return (both := change(keys, True)), both
    return change(queries, True), change(keys, False)


def _image_layouts(dice: random.Random, batch: int, side: int) -> tuple[Layout, Layout]:
    height = dice.randint(1, side)
    width = dice.randint(1, side * side // height + 3)
    valid = None
    if dice.random() < 0.3:
        generator = torch.Generator().manual_seed(dice.randrange(2**31))
        valid = torch.rand(batch, height, width, generator=generator) < 0.8
    keys = Layout.image(height, width, valid=valid, prefix=dice.choice([0, 0, 1, 3]))
    if dice.random() < 0.3:
        prefix = dice.choice([0, 0, 2])
        return Layout.image(dice.randint(1, side), dice.randint(1, side), prefix=prefix), keys
    return keys, keys
