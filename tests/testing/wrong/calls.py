"""A call with its wrong values, and what calls are made of."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import posenc
from posenc import Attention, Cache, Encoding, Grid, Layout
from posenc.attention.cache import LayerCache
from posenc.models import Decoder, DecoderConfig
from tests.testing.wrong.values import Draw, any_of, not_a, real, some, tensor, truth, whole


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


def attended(**changes: Any) -> dict[str, Any]:
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
