"""Options that no method takes are refused, by the name of the option."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from posenc.errors import ArgumentError
from posenc.registry import ENCODINGS

SIZES: dict[str, Any] = {"dim": 8, "heads": 2, "head_dim": 8, "max_length": 100}

EVERYWHERE: dict[str, Any] = {
    **dict.fromkeys(("dim", "heads", "head_dim", "max_length", "hidden", "axes", "width"), 0),
    "base": 1.0,
}
"""Wrong values of options that mean the same in every method that has them."""

WRONG: dict[str, dict[str, list[Any]]] = {
    "abacus": {"places": [0], "digits": [(), (-1,)], "offset": [-1]},
    "alibi": {"asymmetric": [True]},
    "axial_rope": {
        "head_dim": [7],
        "pairs": [(5,), (0, 0), (1, -1)],
        "base": [(10.0, 1.0)],
        "band": [(1.0,), (0.0, 1.0)],
        "spacing": ["log"],
        "origin": [math.inf],
        "step": [0.0, (1.0, -1.0)],
        "pairing": ["adjacnt"],
        "gain": [0.0],
    },
    "complex_order": {"dim": [5], "shared": ["word"]},
    "comrope": {"block": [3], "span": [-1.0], "variant": ["axal"]},
    "contextual": {"max_distance": [-1]},
    "conv": {"groups": [3], "activation": ["relu"], "axes": [3], "padding": ["circlar"]},
    "cope": {"max_count": [1]},
    "dape": {"bias": ["rope"]},
    "deberta": {
        "max_distance": [0],
        "buckets": [7, 2],
        "projections": ["shared"],
        "lookup": ["microsoft"],
        "clamp": ["never"],
    },
    "decomposed2d": {"size": [(3, 0), (3, 3, 3)]},
    "dynamic_bias": {"depth": [0]},
    "fire": {"scale": [0.0], "threshold": [-1.0]},
    "floater": {
        "step": [0.0],
        "tolerance": [-1.0],
        "unit": [math.inf],
        **{name: ["nothing"] for name in ("start", "activation", "method", "gradient")},
    },
    "fope": {"head_dim": [7], "max_length": [6], "gain": [-0.1, math.inf], "pairing": ["adjacnt"]},
    "fourier": {"features": [3], "gamma": [0.0]},
    "gaussian_fourier": {"dim": [3], "sigma": [0.0]},
    "grape_additive": {"width": [3]},
    "grape_contextual": {"head_dim": [7], "base": [0.5], "length": [0.0]},
    "grape_multiplicative": {"head_dim": [7]},
    "hierarchical": {"alpha": [0.5, 1.0, 0.0]},
    "irpe": {
        "on": ["", "kk", "x"],
        "alpha": [0.0],
        "beta": [1.0],
        "gamma": [1.5, math.inf],
        "method": ["prodct"],
        "mode": ["prodct"],
    },
    "kerple": {"kernel": ["logg"]},
    "learned2d": {"size": [(0, 4), (4,)], "special": [-1]},
    "lierope": {"block": [3, 1], "span": [0.0]},
    "mrope": {
        "head_dim": [4, 9],
        "sections": [(4, 4), (4, 4, 0), (3, 3, 3)],
        "arrangement": ["interleave"],
    },
    "multiplicative": {"bound": [0.0, 2.0]},
    "p_rope": {"head_dim": [7], "p": [1.5, -0.1], "pairing": ["adjacnt"]},
    "path": {"rank": [0], "kernel": [0]},
    "pope": {"initial": ["unifrm"]},
    "radix": {"digits": [0], "join": ["sums"]},
    "recursive": {"step": ["lineal"]},
    "relative_bias": {"placement": ["inside_"]},
    "relative_logits": {"extent": [0], "floor": [0.0], "alpha": [-1.0]},
    "rope": {"head_dim": [7], "fraction": [0.0], "pairing": ["adjacnt"]},
    "rope2d": {"head_dim": [6], "pairing": ["adjacnt"]},
    "rope_mixed": {"head_dim": [6]},
    "rope_pp": {"head_dim": [7], "pairing": ["adjacnt"]},
    "row_column": {"dim": [3], "size": [(4, 0)]},
    "sandwich": {"width": [3]},
    "seqpe": {"heads": [5], "digits": [0], "depth": [0], "dropout": [1.0]},
    "shaw": {"max_distance": [-1]},
    "sine2d": {"dim": [10], "temperature": [1.0], "scale": [0.0, math.inf]},
    "sinusoidal": {"arrangement": ["interleave"], "fusion": ["multipl"]},
    "stick_breaking": {"remainder": ["others"]},
    "swin": {"window": [(0, 3), (3,), (2.5, 3)]},
    "swin_v2": {"window": [(0, 3)], "logits": ["cosin"]},
    "t5": {"buckets": [30, 0], "max_distance": [8]},
    "transformer_xl": {"dim": [7]},
    "tupe": {"buckets": [30], "max_distance": [8]},
    "xpos": {
        "head_dim": [7],
        "gamma": [0.0],
        "scale_base": [0.0, math.nan],
        "pairing": ["adjacnt"],
    },
}
"""Further wrong values of single options."""

TOGETHER: list[tuple[str, str, dict[str, Any]]] = [
    ("axial_rope", "base", {"pairs": (2, 2), "base": (10.0, 10.0, 10.0)}),
    ("axial_rope", "heads", {"heads": None, "across_heads": True}),
    ("axial_rope", "heads", {"heads": None, "learned": True, "pairs": (2, 2)}),
    ("axial_rope", "pairs", {"across_heads": True, "pairs": (3, 4)}),
    ("axial_rope", "pairs", {"learned": True}),
    ("axial_rope", "pairs", {"divisors": (1.0,) * 4}),
    ("axial_rope", "across_heads", {"across_heads": True, "learned": True, "pairs": (2, 2)}),
    ("axial_rope", "divisors", {"pairs": (2, 2), "divisors": (1.0,) * 3}),
    ("complex_order", "vocabulary", {"shared": "dimensions"}),
    ("complex_order", "vocabulary", {"shared": "none", "vocabulary": 0}),
    ("comrope", "block", {"block": 8, "variant": "axial"}),
    ("conv", "causal", {"axes": 2, "causal": True}),
    ("conv", "kernel", {"kernel": 0, "causal": True}),
    ("conv", "padding", {"padding": "circular", "causal": True}),
    ("deberta", "max_distance", {"max_distance": 100, "buckets": 200}),
    ("irpe", "on", {"on": "v", "mode": "bias"}),
    ("mrope", "sections", {"head_dim": 16, "sections": (1, 4, 3), "arrangement": "interleaved"}),
    ("radix", "dim", {"digits": 3, "join": "concatenate"}),
    ("radix", "digits", {"digits": 2, "max_length": 101}),
    ("rope", "head_dim", {"fraction": 0.3}),
    ("sinusoidal", "dim", {"dim": 5, "arrangement": "whisper"}),
    ("sinusoidal", "dim", {"dim": 2, "arrangement": "whisper"}),
]
"""Methods, the options that are named, and options that do not go together."""


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """As ``TOGETHER``, with each wrong value of a single option."""
    for name, entry in ENCODINGS.items():
        for option in (x for x in EVERYWHERE if x in entry.parameters()):
            yield name, option, {option: EVERYWHERE[option]}
        for option, values in WRONG.get(name, {}).items():
            yield from ((name, option, {option: value}) for value in values)
    yield from TOGETHER


@pytest.mark.parametrize(("name", "option", "given"), list(cases()))
def test_wrong_options_are_named(name: str, option: str, given: dict[str, Any]) -> None:
    entry = ENCODINGS[name]
    sizes = {size: SIZES[size] for size in SIZES.keys() & entry.parameters().keys()}
    with pytest.raises(ArgumentError) as refused:
        entry.factory(**(sizes | given))
    assert refused.value.argument == option
