"""RoPE extended by a random method, whose pairs may be in bands with rotations of their own."""

from __future__ import annotations

import random
from typing import Any

import torch

from posenc.encoding import Encoding
from posenc.encoding.entry import Entry
from posenc.encodings.query_key.rope import Rope
from posenc.extension import extend

LENGTH = 70

BOTH_WAYS: dict[str, dict[str, Any]] = {
    "leaky_rerope": {"window": 13, "factor": 3},
    "rerope": {"window": 12.5},
    "self_extend": {"window": 14, "group": 3},
    "yarn": {"factor": 4},
}
CAUSAL: dict[str, dict[str, Any]] = {
    "dual_chunk": {"reach": 21, "local": 4},
    "string": {"shift": 40, "local": 6, "factor": 1.2},
}


def _factory(*, head_dim: int, causal: bool) -> Encoding:
    """An encoding drawn by PyTorch's global generator."""
    dice = random.Random(int(torch.randint(2**31, ())))
    rope = Rope(
        head_dim=head_dim,
        pairing=dice.choice(["half", "adjacent"]),
        fraction=dice.choice([0.5, 1.0]),
        gain=dice.choice([1.0, 1.1]),
    )
    methods = BOTH_WAYS | (CAUSAL if causal else {})
    name = dice.choice(list(methods))
    extended = extend(Encoding.of(rope), name, **{"factor": 2, "length": LENGTH} | methods[name])
    if dice.random() < 0.3:
        extended = extend(extended, "log_n", length=20)
    return extended


ENTRY = Entry(
    factory=_factory,
    summary="Rotates, as extended.",
    sites=("query_key", "score"),
    relative=False,
    trainable=False,
    extrapolates="Unknown.",
    cost="Any.",
)
