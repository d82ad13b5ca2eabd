"""Random invalid calls of the public API: each must raise posenc's own error, naming an argument.

Run more of them with ``python -m tests.testing.call_fuzz --count 1000``.
"""

from __future__ import annotations

import argparse
import random
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import posenc
from posenc import Attention, Cache, Encoding, Grid, Layout
from posenc.attention.cache import LayerCache
from posenc.errors import PosencError
from posenc.extension import EXTENSIONS, advice, applicable, extend, extend_layers
from posenc.models import Decoder, DecoderConfig, Sample, generate, load
from posenc.registry import ENCODINGS

Draw = Callable[[random.Random], object]
"""A random value that is none of an argument's."""

NUMBERS = (float("nan"), float("inf"), -float("inf"), 2.5, 1j, Decimal("1.5"), np.float32(2.5))
TEXTS = ("", "x", "3", "true", "none", "0.5", b"8", bytearray(b"x"))
GROUPS = ((), (1,), [2, 3], (1, 2, 3, 4), {}, {"a": 1}, {1}, range(3), np.arange(3))
OBJECTS = (object, len, Ellipsis, NotImplemented, slice(3), random)
TENSORS = (
    *(torch.tensor(2.5), torch.tensor([1.0, 2.0]), torch.zeros(2, 3), torch.tensor(1j)),
    *(torch.tensor([True, False]), torch.zeros(0), torch.eye(3).to_sparse()),
)
"""Values of other kinds; what one domain has in common with them is left out there."""


def some(*pools: Sequence[object]) -> Draw:
    """A value of one of the pools, each as likely as the others."""
    filled = [pool for pool in pools if len(pool)]
    return lambda source: source.choice(source.choice(filled))


def any_of(*draws: Draw) -> Draw:
    """A value of one of the draws."""
    return lambda source: source.choice(draws)(source)


def whole(least: int = 1, *, most: int | None = 2**53, optional: bool = False) -> Draw:
    """No whole number from ``least`` (to ``most``)."""

    def draw(source: random.Random) -> object:
        below = least - 1 - source.choice((0, 1, source.randrange(10**6), 2**31, 2**63, 10**400))
        beyond = 2**53 if most is None else most + source.choice((1, 2**63, 2**64, 10**400))
        bounds = (below,) if most is None else (below, beyond)
        fraction = source.randrange(1, 100) + source.choice((0.5, 0.0, 1e-9))
        return source.choice((source.choice(bounds), fraction, source.choice((True, False))))

    kinds = any_of(draw, some(NUMBERS, TEXTS, GROUPS, OBJECTS, TENSORS))
    return kinds if optional else any_of(kinds, kinds, kinds, lambda source: None)


REAL_KINDS = some((1j, True, False), TEXTS, GROUPS, OBJECTS, TENSORS[1:])


def real(*, above: float, below: float = float("inf"), optional: bool = False) -> Draw:
    """No number between ``above`` and ``below``, both excluded."""

    def draw(source: random.Random) -> object:
        outside = [float("nan"), above - 10 ** source.uniform(-3, 30), -float("inf"), 10**400]
        if below < float("inf"):
            outside.append(below + 10 ** source.uniform(-3, 30))
        return source.choice((*outside, float("inf")))

    kinds = any_of(draw, REAL_KINDS)
    return kinds if optional else any_of(kinds, kinds, kinds, lambda source: None)


def truth(*, optional: bool = False) -> Draw:
    """Neither True nor False."""
    others = (0, 1, 2, -1, "yes", "False", np.int64(1), torch.tensor(True), *NUMBERS)
    return some(others, TEXTS, GROUPS, OBJECTS, () if optional else (None,), others)


def not_a(*, optional: bool = False, but: tuple[type, ...] = ()) -> Draw:
    """No object of posenc's classes, and of none of ``but``."""
    pools = [
        [value for value in pool if not isinstance(value, but)]
        for pool in (NUMBERS, TEXTS, GROUPS, OBJECTS, TENSORS, (0, 1, True), (None,))
    ]
    return some(*pools[: -1 if optional else None])


NAME = some(("ropa", "rope+", "+", "rope+rope", "rope@", "rope@bas=1", "rope@base", "rope@base=x"))
ANY_NAME = any_of(NAME, not_a(but=()))
DEVICE = some(("gpu", "x", "cuda:x", ""), (2.5, 1j, True, object, (), [], {}), TENSORS)


def indices(rows: int) -> Draw:
    """No tensor of row numbers below ``rows``."""
    wrong = (
        torch.tensor([rows]),
        torch.tensor([0, -rows - 1]),
        torch.tensor([[0]]),
        torch.tensor(0),
        torch.tensor([0.0]),
        torch.tensor([True] * (rows + 1)),
    )
    return any_of(some(wrong), not_a(but=(Tensor,)))


def tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    optional: bool = False,
    free: int = 0,
) -> Draw:
    """A tensor of another shape (but for the ``free`` first axes) or dtype, or none at all."""

    def draw(source: random.Random) -> object:
        good = torch.ones(shape, dtype=dtype)
        axis = source.randrange(len(shape))
        if dtype.is_floating_point:
            kinds: tuple[Callable[[], Tensor], ...] = (
                lambda: good.long(),
                lambda: good.to(torch.complex64),
                lambda: good.to_sparse(),
                lambda: good > 0,
            )
        else:
            kinds = (lambda: good.float(), lambda: good.to(torch.complex64), good.to_sparse)
        shapes: tuple[Callable[[], Tensor], ...] = (
            lambda: torch.cat([good, good, good], dim=max(axis, free)),
            lambda: good.unsqueeze(axis),
            lambda: good.select(axis, 0),
            lambda: good.flatten(),
            lambda: good.to("meta"),
        )
        return source.choice((*kinds, *shapes[free == len(shape) :]))()

    return any_of(draw, draw, not_a(optional=optional, but=(Tensor,)))


@dataclass(frozen=True)
class Call:
    """A function of the public API.

    Args:
        name: as a user writes it.
        function: takes all arguments by name.
        valid: makes arguments that it accepts.
        invalid: for each argument that is fuzzed, values that it must refuse.
        others: arguments that an error may name instead of one of ``invalid``, by the latter.
    """

    name: str
    function: Callable[..., object]
    valid: Callable[[], dict[str, Any]]
    invalid: Mapping[str, Draw]
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """An invalid call that was accepted, or raised another error."""

    call: str
    wrong: Mapping[str, object]
    problem: str

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in self.wrong.items())
        return f"{self.call}({shown}): {self.problem}"


B, H, L, D, C = 2, 2, 6, 8, 16


def sequence() -> Layout:
    return Layout.sequence(L)


def rope() -> Encoding:
    return posenc.create("rope", head_dim=D)


def attention(**changes: Any) -> Attention:
    return Attention(**({"dim": C, "heads": H, "encoding": rope(), "causal": True} | changes))


def decoder() -> Decoder:
    return Decoder(DecoderConfig(vocabulary=9, dim=C, heads=H, layers=2))


def filled() -> LayerCache:
    kept = LayerCache()
    kept.append(torch.ones(B, H, L, D), torch.ones(B, H, L, D), sequence())
    return kept


def filled_cache() -> Cache:
    kept = Cache(2)
    for layer in kept.layers:
        layer.append(torch.ones(B, H, L, D), torch.ones(B, H, L, D), sequence())
    return kept


SIZES: dict[str, Draw] = {
    "dim": whole(optional=True),
    "heads": whole(optional=True),
    "head_dim": whole(optional=True),
    "max_length": whole(optional=True),
    "causal": truth(optional=True),
}

GRID: dict[str, Draw] = {"causal": truth(), "window": whole(most=None, optional=True)}

Q = (B, H, L, D)
SPOILED = (
    *(torch.ones(B, H, L + 1, D), torch.ones(B + 1, H, L, D), torch.ones(H, L, D)),
    *(torch.ones(Q) > 0, torch.ones(Q).double(), torch.ones(Q).to_sparse(), torch.ones(Q) * 1j),
    *(torch.ones(Q).to("meta"), torch.ones(1, *Q), torch.ones(Q).long()),
)
"""Queries or values that fit no keys; heads of the one, and the width of the other, are free."""

ATTEND: dict[str, Draw] = {
    "q": any_of(some(SPOILED), not_a(but=(Tensor,))),
    "k": tensor(Q),
    "v": any_of(some(SPOILED), not_a(but=(Tensor,))),
    "grid": any_of(not_a(), lambda source: Grid.of(Layout.sequence(source.choice((1, L + 1, 90))))),
    "encoding": any_of(
        not_a(), lambda source: posenc.create("rope", head_dim=source.choice((2, 4, 10, 16)))
    ),
    "backend": any_of(some(("", "x", "nativ", "cuda")), not_a(but=(str,))),
    "dropout": real(above=-1e-9, below=1.0 - 1e-9),
    "scale": real(above=0.0, optional=True),
}


def _attended(**changes: Any) -> dict[str, Any]:
    tensors = {name: torch.ones(Q) for name in "qkv"}
    return tensors | {"grid": Grid.of(sequence(), causal=True), "encoding": rope()} | changes


FITS = dict.fromkeys(("q", "k", "v", "grid", "encoding"), ("q", "k", "v", "grid", "encoding"))
"""Arguments that do not fit together: the error names one of them."""

WHERE = {"x": ("layout", "tokens"), "layout": ("x", "tokens"), "tokens": ("x", "layout")}

LAYOUT = not_a()

COUNTS = (list, tuple, range, np.ndarray)
"""Kinds that may be lengths."""

MANY = (list, tuple, dict, set, str, range, Tensor, np.ndarray)
"""Kinds that may be empty sequences."""

IDS = tensor((B, L), torch.int64, free=2)


def other_layout(source: random.Random) -> Layout:
    """A layout of another length, number of rows or axes."""
    return source.choice(
        (
            Layout.sequence(L + source.randrange(1, 9)),
            Layout.padded([L] * (B + 1)),
            Layout.sequence(0 + source.randrange(1, L)),
        )
    )


@cache
def calls() -> tuple[Call, ...]:
    """The public API."""
    mask = torch.ones(B, L, dtype=torch.bool)
    positions = torch.arange(float(L)).reshape(1, L, 1)
    order = torch.arange(L).reshape(1, L)
    layouts = (
        Call(
            "Layout.sequence",
            Layout.sequence,
            lambda: {"length": L},
            {"length": whole(), "start": whole(-(2**53)), "prefix": whole(0), "device": DEVICE},
        ),
        Call(
            "Layout.packed",
            lambda lengths, device=None: Layout.packed(lengths, device=device),
            lambda: {"lengths": [3, 2]},
            {"lengths": any_of(lambda s: [3, whole()(s)], not_a(but=COUNTS)), "device": DEVICE},
        ),
        Call(
            "Layout.padded",
            Layout.padded,
            lambda: {"lengths": [3, 2]},
            {
                "lengths": any_of(lambda s: [3, whole(0)(s)], not_a(but=COUNTS)),
                "length": whole(3, optional=True),
                "side": any_of(some(("", "rigth", "LEFT")), not_a(but=(str,))),
                "prefix": whole(0),
                "device": DEVICE,
            },
            {"length": ("lengths",), "lengths": ("length",)},
        ),
        Call(
            "Layout.from_attention_mask",
            Layout.from_attention_mask,
            lambda: {"mask": mask.long()},
            {
                "mask": any_of(
                    some(
                        (mask.long() * 2, mask.float() - 0.5, mask[0], mask.to_sparse()),
                        (mask.float() * float("nan"), mask.unsqueeze(0), mask * -1e9),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "special": any_of(
                    some((mask.long(), mask[:, 1:], mask[0], mask.expand(2, B, L), mask[:1, :1])),
                    not_a(optional=True, but=(Tensor,)),
                ),
            },
        ),
        Call(
            "Layout.image",
            Layout.image,
            lambda: {"height": 2, "width": 3},
            {
                "height": whole(),
                "width": whole(),
                "prefix": whole(0),
                "device": DEVICE,
                "valid": any_of(
                    some((torch.ones(1, 2, 3), torch.ones(1, 3, 2, dtype=torch.bool), mask)),
                    not_a(optional=True, but=(Tensor,)),
                ),
            },
        ),
        Call(
            "Layout.at",
            Layout.at,
            lambda: {"times": torch.arange(6.0)},
            {
                "times": any_of(
                    some(
                        (torch.tensor(3.0), torch.zeros(1, 1, 1, 1), torch.ones(6) * 1j),
                        (torch.full((6,), float("nan")), torch.tensor([0.0, float("inf")])),
                        (torch.tensor([0, 2**53 + 1]), torch.ones(6) > 0, torch.eye(6).to_sparse()),
                        (torch.ones(6).half(), torch.ones(6).bfloat16()),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "valid": any_of(
                    some((mask.long(), mask[:, 1:], mask[0])), not_a(optional=True, but=(Tensor,))
                ),
            },
            {"times": ("positions",)},
        ),
        Call(
            "Layout",
            Layout,
            lambda: {"positions": positions, "order": order},
            {
                "positions": any_of(
                    some(
                        (positions.long(), positions.half(), positions[0], positions * 1j),
                        (positions / 0, positions.to_sparse(), positions[:, 1:]),
                    ),
                    not_a(but=(Tensor,)),
                ),
                "order": any_of(
                    some((order.float(), order[0], order[:, 1:], order.int(), order.to_sparse())),
                    not_a(but=(Tensor,)),
                ),
                "document": any_of(
                    some((order.float(), order[0], order[:, 1:])),
                    not_a(optional=True, but=(Tensor,)),
                ),
                "valid": any_of(
                    some((mask.long(), mask[0], mask[:, 1:])), not_a(optional=True, but=(Tensor,))
                ),
                "special": any_of(
                    some((mask.long(), mask[0], mask[:, 1:])), not_a(optional=True, but=(Tensor,))
                ),
                "signal": any_of(
                    some((torch.ones(1, L), torch.ones(1, L + 1, 2), torch.ones(1, L, 2).long())),
                    not_a(optional=True, but=(Tensor,)),
                ),
                "start": any_of(whole(-(2**53), optional=True), some((7, -1, 1, 2**40))),
                "extent": any_of(
                    some(((2, 3), (1, 6), (6, 1), (0, 6), "23")), not_a(optional=True)
                ),
                "consecutive": truth(),
            },
            {"positions": ("order", "layout"), "order": ("positions", "layout")},
        ),
        Call(
            "Layout with consecutive",
            lambda positions: Layout(positions, order, consecutive=True),
            lambda: {"positions": positions},
            {
                "positions": some(
                    (positions * 2, positions.flip(1), positions + positions.floor() ** 2)
                )
            },
            {"positions": ("consecutive",)},
        ),
        Call(
            "Layout.to",
            lambda device: sequence().to(device),
            lambda: {"device": "cpu"},
            {"device": DEVICE},
        ),
        Call(
            "Layout.slice",
            lambda begin, end: sequence().slice(begin, end),
            lambda: {"begin": 1, "end": 4},
            {name: whole(-(2**53)) for name in ("begin", "end")},
        ),
        Call(
            "Layout.select",
            lambda rows: Layout.padded([3, 2]).select(rows),
            lambda: {"rows": torch.tensor([0])},
            {"rows": indices(2)},
        ),
        Call(
            "Layout.with_positions",
            lambda positions: sequence().with_positions(positions),
            lambda: {"positions": positions},
            {"positions": any_of(some((positions.long(), positions[:, 1:])), not_a(but=(Tensor,)))},
            {"positions": ("order",)},
        ),
        Call(
            "Layout.concat",
            lambda other: Layout.padded([3, 2]).concat(other),
            lambda: {"other": sequence()},
            {"other": any_of(some((Layout.image(2, 3), Layout.padded([1, 2, 3]))), not_a())},
            {"other": ("layout", "signal")},
        ),
    )
    grids = (
        Call(
            "Grid",
            Grid,
            lambda: {"query": sequence(), "key": sequence()},
            {
                "query": any_of(not_a(), lambda source: Layout.image(2, 3)),
                "key": any_of(not_a(), lambda source: Layout.at(torch.zeros(1, L, 3))),
                **GRID,
            },
            {"query": ("grid",), "key": ("grid",)},
        ),
        Call(
            "Grid.of",
            Grid.of,
            lambda: {"layout": sequence()},
            {"layout": not_a(), **GRID},
            {"layout": ("query",)},
        ),
    )
    creation = (
        Call(
            "create",
            posenc.create,
            lambda: {"name": "nope"},
            {"name": any_of(NAME, not_a()), **SIZES},
            {"name": ("encoding", "option", "base")},
        ),
        Call(
            "create_layers",
            posenc.create_layers,
            lambda: {"name": "rope", "layers": 2, "head_dim": D},
            {"name": any_of(NAME, not_a()), "layers": whole(), **SIZES},
            {"name": ("encoding", "option", "base"), "head_dim": ("dim",)},
        ),
        *(
            Call(
                f"create {name!r}",
                posenc.create,
                lambda name=name: (
                    {"name": name, "dim": C, "heads": H, "head_dim": D} | {"max_length": 64}
                ),
                {
                    option: some((object, len, 1j), (torch.zeros(2, 3), torch.tensor(1j)))
                    for option in entry.options()
                },
            )
            for name, entry in ENCODINGS.items()
            if entry.options()
        ),
        Call(
            "ENCODINGS.require",
            ENCODINGS.require,
            lambda: {"name": "rope"},
            {"name": any_of(some(("ropa", "", "rope+alibi")), not_a(but=(str,)))},
            {"name": ("encoding",)},
        ),
        Call(
            "register",
            posenc.register,
            lambda: {"name": "new", "entry": ENCODINGS["rope"]},
            {"name": any_of(some(("alibi", "a b", "")), not_a(but=(str,))), "entry": not_a()},
            {"name": ("encoding",)},
        ),
        Call(
            "Encoding.of",
            lambda part: Encoding.of(part),
            lambda: {"part": rope().query_key},
            {"part": any_of(not_a(), lambda source: rope())},
        ),
        *(
            Call("Encoding", Encoding, lambda site=site: {site: None}, {site: not_a(optional=True)})
            for site in Encoding.SITES
        ),
        Call(
            "Encoding +",
            lambda encoding: rope() + encoding,
            lambda: {"encoding": Encoding()},
            {"encoding": any_of(not_a(), lambda source: rope())},
        ),
        Call(
            "Encoding.heads",
            lambda begin, end: posenc.create("alibi", heads=4).heads(begin, end),
            lambda: {"begin": 0, "end": 2},
            {"begin": whole(0, most=1), "end": whole(1, most=4)},
            {"begin": ("heads", "end"), "end": ("heads", "begin")},
        ),
        Call(
            "Encoding.queries",
            lambda heads: rope().queries(heads),
            lambda: {"heads": 2},
            {"heads": whole()},
        ),
        *(
            Call(
                f"embed by {name!r}",
                posenc.create(name, dim=C, max_length=64).embed,
                lambda: {"x": torch.ones(B, L, C), "layout": sequence()},
                {
                    "x": tensor((B, L, C), free=1),
                    "layout": any_of(LAYOUT, other_layout),
                    "tokens": tensor((B, L), torch.int64, optional=True),
                },
                WHERE,
            )
            for name in ("sinusoidal", "learned", "conv")
        ),
        *(
            Call(
                f"observe by {name!r}",
                posenc.create(name, dim=C, heads=H).observe,
                lambda: {"x": torch.ones(B, L, C), "layout": sequence()},
                {"x": tensor((B, L, C), free=1), "layout": any_of(LAYOUT, other_layout)},
                WHERE,
            )
            for name in ("forgetting", "grape_additive")
        ),
    )
    attending = (
        Call("attend", posenc.attend, _attended, {**ATTEND, "return_lse": truth()}, FITS),
        Call("explain", posenc.explain, _attended, {**ATTEND, "cache": not_a(optional=True)}, FITS),
        Call(
            "Attention",
            Attention,
            lambda: {"dim": C, "heads": H, "encoding": Encoding()},
            {
                "dim": whole(),
                "heads": whole(),
                "kv_heads": whole(optional=True),
                "head_dim": whole(optional=True),
                "encoding": not_a(),
                **GRID,
                "bias": truth(),
                "output_bias": truth(optional=True),
                "merged": truth(),
                "dropout": ATTEND["dropout"],
                "scale": ATTEND["scale"],
                "backend": ATTEND["backend"],
            },
        ),
        *(
            Call(
                f"Attention(merged={merged})()",
                attention(merged=merged),
                lambda: {"x": torch.ones(B, L, C), "layout": sequence()},
                {
                    "x": tensor((B, L, C), free=1),
                    "layout": any_of(LAYOUT, other_layout),
                    "context": any_of(
                        not_a(optional=True, but=(Tensor,)), lambda source: torch.ones(B, L + 1, C)
                    ),
                    "context_layout": any_of(not_a(optional=True), lambda source: sequence()),
                    "cache": any_of(not_a(optional=True), lambda source: Cache(2)),
                },
                WHERE | {"context_layout": ("context",)},
            )
            for merged in (False, True)
        ),
        Call(
            "Attention() of a context",
            attention(causal=False),
            lambda: {
                "x": torch.ones(B, L, C),
                "layout": sequence(),
                "context": torch.ones(B, 3, C),
                "context_layout": Layout.sequence(3),
            },
            {
                "context": tensor((B, 3, C), optional=True),
                "context_layout": any_of(not_a(), lambda source: Layout.sequence(4)),
            },
            {"context": ("context_layout", "k"), "context_layout": ("context",)},
        ),
        Call(
            "Attention.project",
            attention().project,
            lambda: {"context": torch.ones(B, L, C), "layout": sequence()},
            {"context": tensor((B, L, C), free=1), "layout": any_of(LAYOUT, other_layout)},
            {"context": ("layout",), "layout": ("context",)},
        ),
        Call(
            "attention of a cache of other sizes",
            lambda x: attention()(x, Layout.sequence(L, L), cache=filled()),
            lambda: {"x": torch.ones(B, L, C)},
            {"x": some((torch.ones(B + 1, L, C), torch.ones(1, L, C)))},
            {"x": ("cache", "keys", "k")},
        ),
    )
    caches = (
        Call("Cache", Cache, lambda: {"layers": 2}, {"layers": whole(0, most=2**16)}),
        Call(
            "Cache[]",
            lambda layer: Cache(2)[layer],
            lambda: {"layer": 1},
            {"layer": any_of(not_a(but=(int, slice)), some((2, -3, 99)))},
        ),
        *(
            Call(
                f"{kind.__name__}.select",
                lambda rows, kind=kind: kind().select(rows),
                lambda: {"rows": torch.tensor([0])},
                {"rows": indices(B)},
            )
            for kind in (filled, filled_cache)
        ),
        *(
            Call(
                f"{kind.__name__}.truncate",
                lambda length, kind=kind: kind().truncate(length),
                lambda: {"length": 3},
                {"length": whole(0)},
            )
            for kind in (filled, filled_cache)
        ),
        Call(
            "LayerCache.append",
            lambda keys, values, layout: filled().append(keys, values, layout),
            lambda: {
                "keys": torch.ones(Q),
                "values": torch.ones(Q),
                "layout": Layout.sequence(L, L),
            },
            {"keys": tensor(Q), "values": tensor(Q), "layout": any_of(LAYOUT, other_layout)},
            {"keys": ("values", "layout"), "values": ("keys", "layout"), "layout": ("keys",)},
        ),
        Call(
            "LayerCache.following",
            lambda length, device=None: filled().following(length, device=device),
            lambda: {"length": 1},
            {"length": whole(), "device": DEVICE},
        ),
    )
    stretch = (
        Call(
            "extend",
            extend,
            lambda: {"encoding": rope(), "name": "yarn", "factor": 2, "length": 64},
            {
                "encoding": any_of(not_a(), lambda source: Encoding()),
                "name": any_of(some(("yarm", "yarn+yarn", "yarn@alpha=x", "segments")), not_a()),
                "factor": real(above=1.0 - 1e-9),
                "length": real(above=2.0 - 1e-9),
            },
            {"name": ("method", "alpha"), "encoding": ("encoding",)},
        ),
        Call(
            "extend_layers",
            extend_layers,
            lambda: {"encodings": [rope()], "name": "yarn", "factor": 2, "length": 64},
            {
                "encodings": any_of(not_a(but=MANY), lambda s: [not_a()(s)]),
                "name": not_a(),
                "factor": real(above=1.0 - 1e-9),
                "layers": any_of(
                    not_a(optional=True, but=(dict,)),
                    some(({1: {}}, {-1: {}}, {"0": {}}, {0: {"factr": 2}}, {0: 3}, {True: {}})),
                ),
            },
            {"name": ("method",), "encodings": ("encoding",), "layers": ("option",)},
        ),
        Call("applicable", applicable, lambda: {"encoding": rope()}, {"encoding": not_a()}),
        Call(
            "advice",
            advice,
            lambda: {"encoding": rope(), "name": "llama3", "factor": 2, "length": 64},
            {"encoding": not_a(), "name": not_a(), "factor": real(above=1.0 - 1e-9)},
            {"name": ("method",)},
        ),
        *(
            Call(
                f"extension.{name}",
                method.function,
                lambda name=name: (
                    {"encoding": posenc.create(EXTENSIONS[name].on[0], head_dim=D)}
                    | {
                        n: {"factor": 1.5, "length": 64.0}[n]
                        for n in ("factor", "length")
                        if n in EXTENSIONS[name].parameters()
                    }
                ),
                {"encoding": not_a()}
                | {
                    n: real(above=1.0 - 1e-9)
                    for n in ("factor", "length")
                    if n in method.parameters()
                }
                | {
                    option: some((object, len, 1j), (torch.zeros(2, 3), torch.tensor(1j)))
                    for option in method.options()
                },
            )
            for name, method in EXTENSIONS.items()
            if method.level == "encoding" and method.on == ("rope",)
        ),
    )
    model = decoder()
    ids = torch.zeros(B, L, dtype=torch.int64)
    of_models = (
        Call(
            "DecoderConfig",
            DecoderConfig,
            lambda: {"vocabulary": 9, "dim": C, "heads": H, "layers": 1},
            {
                **{name: whole() for name in ("vocabulary", "dim", "heads", "layers")},
                **{name: whole(optional=True) for name in ("kv_heads", "head_dim", "max_length")},
                "encoding": not_a(but=(str,)),
                "options": not_a(but=(dict,)),
                "dropout": ATTEND["dropout"],
                "tied": truth(),
                "window": any_of(some((0, -1, 2.5, True, "8", 1j, object))),
            },
        ),
        Call(
            "Decoder",
            Decoder,
            lambda: {"config": model.config},
            {"config": not_a(), "encodings": any_of(not_a(optional=True), lambda source: [rope()])},
        ),
        Call(
            "Decoder()",
            model,
            lambda: {"tokens": ids},
            {
                "tokens": any_of(IDS, some((ids + 9, ids - 1))),
                "layout": any_of(not_a(optional=True), other_layout),
                "cache": any_of(not_a(optional=True), lambda source: LayerCache()),
            },
            {"tokens": ("layout",), "layout": ("tokens",)},
        ),
        Call(
            "generate",
            generate,
            lambda: {"model": model, "prompt": ids, "max_new_tokens": 1},
            {
                "model": not_a(),
                "prompt": any_of(IDS, some((ids + 9, ids[:, :0]))),
                "max_new_tokens": whole(0),
                "sampling": not_a(optional=True),
                "stop_token": whole(0, optional=True),
                "layout": any_of(not_a(optional=True), other_layout),
                "cached": truth(),
            },
            {"prompt": ("tokens", "layout"), "layout": ("prompt", "tokens")},
        ),
        Call(
            "Sample",
            Sample,
            dict,
            {
                "temperature": real(above=0.0),
                "top_k": whole(optional=True),
                "top_p": real(above=0.0, below=1.0),
                "generator": not_a(optional=True),
            },
        ),
        Call("load", load, lambda: {"folder": "nowhere"}, {"folder": not_a(but=(str,))}),
    )
    return (*layouts, *grids, *creation, *attending, *caches, *stretch, *of_models)


def run(call: Call, wrong: Mapping[str, object]) -> Finding | None:
    """Call with some wrong arguments; None if the error is posenc's and names one of them."""
    names = [*wrong, *(other for name in wrong for other in call.others.get(name, ()))]
    try:
        call.function(**call.valid() | dict(wrong))
    except PosencError as error:
        if any(name in error.argument for name in names):
            return None
        return Finding(call.name, wrong, f"names {error.argument!r}: {error}")
    except Exception as error:
        return Finding(call.name, wrong, f"{type(error).__name__}: {error}")
    return Finding(call.name, wrong, "is accepted")


def draw(source: random.Random) -> tuple[Call, dict[str, object]]:
    """A random call with one or two wrong arguments."""
    call = source.choice(calls())
    count = min(len(call.invalid), source.choice((1, 1, 1, 2)))
    return call, {
        name: call.invalid[name](source) for name in source.sample(sorted(call.invalid), count)
    }


def fuzz(count: int, *, seed: int) -> list[Finding]:
    """The findings among a number of calls, reproducible by the seed."""
    source = random.Random(seed)
    outcomes = (run(*draw(source)) for _ in range(count))
    return [finding for finding in outcomes if finding is not None]


def main() -> int:
    """Print the findings; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    findings = fuzz(arguments.count, seed=arguments.seed)
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    sys.stdout.write(f"{arguments.count} calls, {len(findings)} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
