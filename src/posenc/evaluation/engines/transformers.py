"""Rules of transformers."""

from __future__ import annotations

import math
from dataclasses import replace

from posenc.evaluation.engines.config import ModelConfig
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.rotation import Rope, Rotation, linear, llama3, plain


def yarn(rope: Rope, length: int) -> Rotation:
    """The gain as it is given, else of ``mscale`` and ``mscale_all_dim``, else the usual one."""
    given = rope.parameters
    gain = given.get("attention_factor")
    if gain is None:
        one, every = (float(given.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        gain = rope.quotient_gain(one, every) if one and every else rope.usual_gain()
    truncate = given.get("truncate")
    return rope.yarn(float(gain), truncate=True if truncate is None else bool(truncate))


def _longrope(rope: Rope, length: int) -> Rotation:
    gain = rope.parameters.get("attention_factor")
    if gain is None:
        longer = rope.factor > 1
        gain = math.sqrt(1 + math.log(rope.factor) / math.log(rope.length)) if longer else 1.0
    return rope.longrope(rope.side(length), float(gain))


def _ropes(config: ModelConfig) -> dict[str, Rope]:
    """``truncate`` is read beside layer types, not in them."""
    beside = config.completed.get("rope_parameters") or {}
    return {
        kind: replace(
            rope, parameters={**rope.parameters, "truncate": beside.get("truncate", True)}
        )
        if kind
        else rope
        for kind, rope in config.ropes().items()
    }


TRANSFORMERS = Engine(
    name="transformers",
    option="transformers",
    source="transformers 5.23, modeling_rope_utils.py",
    read="2026-11",
    kinds={
        "default": plain,
        "linear": linear,
        "dynamic": lambda rope, length: rope.dynamic(length),
        "llama3": llama3,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        "yarn": yarn,
    },
    ropes=_ropes,
    longest=lambda config: config.longest,
)
