"""Calls of attention and its caches."""

from __future__ import annotations

import torch
from torch import Tensor

import posenc
from posenc import Attention, Cache, Encoding, Layout
from tests.testing.wrong.calls import (
    ATTEND,
    FITS,
    GRID,
    LAYOUT,
    WHERE,
    B,
    C,
    Call,
    H,
    L,
    Q,
    attended,
    attention,
    filled,
    filled_cache,
    other_layout,
    sequence,
)
from tests.testing.wrong.values import DEVICE, any_of, indices, not_a, some, tensor, truth, whole


def calls_of_attention() -> tuple[Call, ...]:
    """``attend``, ``Attention`` and ``Cache``."""
    attending = (
        Call("attend", posenc.attend, attended, {**ATTEND, "return_lse": truth()}, FITS),
        Call("explain", posenc.explain, attended, ATTEND, FITS),
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
    return (*attending, *caches)
