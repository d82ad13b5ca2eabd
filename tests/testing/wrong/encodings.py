"""Calls that make encodings and stretch them."""

from __future__ import annotations

import torch

import posenc
from posenc import Encoding
from posenc.extension import EXTENSIONS, advice, applicable, extend, extend_layers
from posenc.registry import ENCODINGS
from tests.testing.wrong.calls import (
    LAYOUT,
    MANY,
    SIZES,
    WHERE,
    B,
    C,
    Call,
    D,
    H,
    L,
    other_layout,
    rope,
    sequence,
)
from tests.testing.wrong.values import NAME, any_of, not_a, real, some, tensor, whole


def calls_of_encodings() -> tuple[Call, ...]:
    """``create`` and its kin, encodings' methods, and ``extend``."""
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
            },
            {"name": ("method",), "encodings": ("encoding",)},
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
    return (*creation, *stretch)
