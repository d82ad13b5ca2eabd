"""Rules of ONNX Runtime GenAI, for the graphs of its model builder.

The builder reads ``config.json`` by transformers, and computes the cosines and sines of all
positions up to the longest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import (
    LONGEST,
    Engine,
    ModelConfig,
    NotServedError,
    UnreadError,
    first,
)
from posenc.transformers.engines.rotation import (
    ALPHA,
    EngineRotation,
    RopeParameters,
    linear,
    llama3,
    ntk_alpha,
    plain,
)

USUAL = frozenset({"default", "linear", "yarn"})
"""Scalings of most models."""

ALL: frozenset[str] = frozenset({"every rope_type"})


@dataclass(frozen=True, kw_only=True)
class Builds:
    """How the builder's class of a model reads a scaling.

    Args:
        starts: scalings that it builds with.
        kinds: those that it applies, others are left out.
        named: scalings by the names that it takes them for.
    """

    starts: frozenset[str] = USUAL
    kinds: frozenset[str] = USUAL
    named: Mapping[str, str] = field(default_factory=dict)


def _all(names: str, builds: Builds) -> dict[str, Builds]:
    return dict.fromkeys(names.split(), builds)


MODELS: dict[str, Builds] = {
    **_all("ernie4_5 gemma gemma2 granite granitemoehybrid lfm2 lfm2_moe mistral", Builds()),
    **_all("olmo phi qwen2 qwen3", Builds()),
    **_all("llama nemotron smollm3", Builds(starts=ALL, kinds=frozenset({"llama3"}))),
    "gpt_oss": Builds(starts=frozenset({"yarn"})),
    "hunyuan_v1_dense": Builds(starts=ALL, kinds=frozenset({"dynamic"}), named={"dynamic": ALPHA}),
}
"""Classes by ``model_type``, but for ``phi3``."""

PHI3 = "phi3"
"""Family with a class for LongRoPE, and another one where the trained length is the longest."""

REFUSED = {
    "gemma3_text": "its builder reads one rope_type for all layers of this model",
    "phimoe": "its builder makes this model for GPUs alone, without LongRoPE",
}
"""Families that are not built, and why."""

UNREAD = frozenset(
    {"gemma3", "gemma4", "gemma4_unified", "lfm2_vl", "mistral3", "phi4_multimodal"}
    | {"qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"}
)
"""Models of images and text that it has."""


def has_builder(family: str) -> bool:
    """True if the builder has a class for this ``model_type``."""
    return family == PHI3 or any(family in table for table in (MODELS, REFUSED, UNREAD))


def _yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """The ends of the ramp must be stated, are not rounded, and lie within a whole head."""
    fast, slow = (float(rope.parameters[name]) for name in ("beta_fast", "beta_slow"))
    if rope.width != rope.head:
        raise NotServedError("its builder takes YaRN for models that rotate whole heads alone")
    start, end = (
        rope.width * math.log(rope.length / (2 * math.pi * turns)) / (2 * math.log(rope.base))
        for turns in (fast, slow)
    )
    if not 0 < start < end < rope.width / 2 - 1:
        raise NotServedError("its builder takes a ramp of YaRN within the pairs of a head alone")
    one, every = (rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    gain = rope.usual_gain()
    if one > 0:
        gain = rope.quotient_gain(one, every) if every > 0 else one
    return rope.yarn(gain, truncate=False)


def _linear(rope: RopeParameters, length: int) -> EngineRotation:
    """The factor must be stated."""
    factor = float(rope.parameters["factor"])
    return linear(replace(rope, parameters={**rope.parameters, "factor": factor}), length)


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """``type`` must be stated beside ``rope_type``; ``attention_factor`` is not read."""
    if rope.parameters["type"] not in ("su", "longrope"):
        raise UnreadError(f"it has another gain for the type {rope.parameters['type']!r}")
    side = rope.side(length)
    stated = rope.number(f"{side}_mscale", 0.0)
    return rope.longrope(side, stated if stated > 0 else rope.length_gain())


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    family = config.family
    if config.outer in UNREAD or family in UNREAD:
        raise UnreadError("its graphs of images and text have not been run")
    if family in REFUSED:
        raise NotServedError(REFUSED[family])
    if config.nested or not has_builder(family):
        raise NotServedError(f"its builder has no model {config.outer}")
    return {
        kind: _read(MODELS[family], rope) if family != PHI3 else _of_phi3(rope)
        for kind, rope in config.ropes().items()
    }


def _read(builds: Builds, rope: RopeParameters) -> RopeParameters:
    """The parameters of a scaling as the builder takes them.

    Raises:
        NotServedError: if it does not build with them.
    """
    kind = rope.kind
    if builds.starts is not ALL and kind not in builds.starts:
        known = ", ".join(sorted(builds.starts))
        raise NotServedError(f"its builder knows no {kind} scaling of this model, but {known}")
    if kind not in builds.kinds:
        return replace(rope, parameters={"rope_type": "default"})
    return replace(rope, parameters={**rope.parameters, "rope_type": builds.named.get(kind, kind)})


def _of_phi3(rope: RopeParameters) -> RopeParameters:
    """LongRoPE where the trained length is not the longest, and only there."""
    if (rope.kind == "longrope") == (rope.longest == rope.length):
        raise NotServedError(
            f"its builder takes this model with LongRoPE just if {TRAINED} is not the longest text"
        )
    return rope


def _longest(config: ModelConfig) -> int | None:
    """The positions that the graph has cosines of."""
    length = first(config.completed, ("seq_length", *LONGEST))
    return int(length) if isinstance(length, int) else None


ONNXRUNTIME_GENAI = Engine(
    name="ONNX Runtime GenAI",
    option="onnxruntime-genai",
    release="0.18.0",
    files="models/builders, with transformers 5.24",
    read="2026-11",
    packages=("onnxruntime-genai",),
    kinds={
        "default": plain,
        "linear": _linear,
        "llama3": llama3,
        ALPHA: ntk_alpha,
        "longrope": _longrope,
        "yarn": _yarn,
    },
    ropes=_ropes,
    longest=_longest,
)
