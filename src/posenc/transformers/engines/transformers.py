"""Rules of transformers."""

from __future__ import annotations

import math
from dataclasses import replace

from posenc.transformers.checkpoints.rope import parameters_in
from posenc.transformers.engines.config import HUNYUAN, ModelConfig
from posenc.transformers.engines.engine import Engine
from posenc.transformers.engines.rotation import (
    ALPHA,
    USUAL,
    EngineRotation,
    RopeParameters,
    ntk_alpha,
)


def yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """The gain as it is given, else of ``mscale`` and ``mscale_all_dim``, else the usual one."""
    parameters = rope.parameters
    gain = parameters.get("attention_factor")
    if gain is None:
        one, every = (float(parameters.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        gain = rope.quotient_gain(one, every) if one and every else rope.usual_gain()
    truncate = parameters.get("truncate")
    return rope.yarn(float(gain), truncate=True if truncate is None else bool(truncate))


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    gain = rope.parameters.get("attention_factor")
    if gain is None:
        longer = rope.factor > 1
        gain = math.sqrt(1 + math.log(rope.factor) / math.log(rope.length)) if longer else 1.0
    return rope.longrope(rope.side(length), float(gain))


def _of_hunyuan(rope: RopeParameters) -> RopeParameters:
    if rope.kind != "dynamic" or not rope.parameters.get("alpha"):
        return rope
    return replace(rope, parameters={**rope.parameters, "rope_type": ALPHA})


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    """``truncate`` is read beside layer types, not in them; ``alpha`` by Hunyuan alone."""
    if config.family in HUNYUAN:
        return {kind: _of_hunyuan(rope) for kind, rope in config.ropes().items()}
    parameters = parameters_in(config.completed)
    return {
        kind: replace(
            rope, parameters={**rope.parameters, "truncate": parameters.get("truncate", True)}
        )
        if kind
        else rope
        for kind, rope in config.ropes().items()
    }


TRANSFORMERS = Engine(
    name="transformers",
    option="transformers",
    source="transformers 5.23, modeling_rope_utils.py, models/hunyuan_v1_dense and _moe",
    read="2026-11",
    kinds={
        **USUAL,
        "dynamic": RopeParameters.dynamic,
        ALPHA: ntk_alpha,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        "yarn": yarn,
    },
    ropes=_ropes,
    longest=lambda config: config.longest,
)
