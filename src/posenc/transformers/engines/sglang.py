"""Rules of SGLang."""

from __future__ import annotations

from dataclasses import replace

from posenc.transformers.checkpoints import TRAINED, parameters_in, scaling_of
from posenc.transformers.engines.config import (
    FULL,
    Engine,
    ModelConfig,
    NotServedError,
    UnreadError,
    first,
)
from posenc.transformers.engines.rotation import (
    USUAL,
    EngineRotation,
    RopeParameters,
    latent_yarn,
    ntk_alpha,
)
from posenc.transformers.engines.transformers import TRANSFORMERS
from posenc.transformers.engines.vllm import (
    OF_TRANSFORMERS,
    PAST_COSINES,
    by_transformers,
    latent_ropes,
    require_unchunked_positions,
)

STEP = "step3p5"
"""Family that reads base and rotated share of each layer, as they are written."""

CHUNKED = frozenset({"glm4", "qwen2", "qwen2_moe", "qwen3_moe"})
"""Families that count positions in chunks where their config says so."""

LENGTHS = (
    *("max_sequence_length", "seq_length", "max_seq_len", "model_max_length"),
    "max_position_embeddings",
)
"""Names of the longest text, in the order of preference."""

UNSCALED = frozenset({"gemma", "mixtral", "phi", "stablelm", "starcoder2"})
"""Families whose files pass the base on, and no scaling."""

BY_TRANSFORMERS = frozenset({"ernie4_5", "gpt_neox", "nemotron", "seed_oss", "smollm3"})
"""Families that it has no file of and serves by transformers' own layers."""

GEMMA = "gemma3_text"
"""Family whose full layers rotate by transformers' formulas; on processors with AMX alone, which
are not what it is served on, by the base."""

OLMO = "olmo3"
"""Family whose base and scaling it reads beside the parameters of layer types."""

INTERLEAVED = frozenset({"glm4"})
"""Families that rotate neighbouring features, which its LongRoPE does not."""

DEFAULT_LENGTH = 2048
"""Longest text by default."""


def _yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """``attention_factor`` is not read, ``attn_factor`` is relative."""
    one, every = (rope.parameters.get(name) for name in ("mscale", "mscale_all_dim"))
    gain = rope.usual_gain()
    if one is not None and every is not None:
        gain = rope.quotient_gain(float(one), float(every))
    truncate = bool(rope.parameters.get("truncate", True))
    return rope.yarn(gain * rope.number("attn_factor", 1.0), truncate=truncate)


def _latent_yarn(rope: RopeParameters, length: int) -> EngineRotation:
    rotation = latent_yarn(rope, length)
    return replace(rotation, gain=rotation.gain * rope.number("attn_factor", 1.0))


def _dynamic(rope: RopeParameters, length: int) -> EngineRotation:
    """One base for all texts, that of ``factor`` squared, or by ``alpha``."""
    if "alpha" in rope.parameters:
        return ntk_alpha(rope, length)
    return rope.ntk(rope.factor * rope.factor - (rope.factor - 1))


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    side = rope.side(length)
    return rope.longrope(side, rope.number(f"{side}_mscale", rope.length_gain()))


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    require_unchunked_positions(config, CHUNKED)
    family, written = config.family, config.written
    if family in BY_TRANSFORMERS:
        return by_transformers(config)
    if family in UNSCALED:
        if any(rope.kind == "dynamic" for rope in config.ropes().values()):
            raise UnreadError(PAST_COSINES)
        return {kind: replace(rope, parameters={}) for kind, rope in config.ropes().items()}
    if family == GEMMA:
        return {kind: _of_gemma(kind, rope) for kind, rope in by_transformers(config).items()}
    if family == OLMO:
        return {kind: _of_olmo(config, kind, rope) for kind, rope in config.ropes().items()}
    if family != STEP:
        ropes = latent_ropes(config)
        if family in INTERLEAVED and any(rope.kind == "longrope" for rope in ropes.values()):
            raise NotServedError("its LongRoPE does not rotate neighbouring features")
        return ropes
    for name in ("rope_theta", "partial_rotary_factors"):
        if not isinstance(written.get(name), list):
            raise NotServedError(f"config.json has no {name} of each layer")
    scaled, scaling = written.get("yarn_only_types") or (), written.get("rope_scaling") or {}
    return {
        kind: replace(rope, parameters=scaling if kind in scaled else {})
        for kind, rope in config.ropes().items()
    }


def _of_gemma(kind: str, rope: RopeParameters) -> RopeParameters:
    """Windows have the base and no scaling, full layers LongRoPE's short factors for all texts."""
    if kind not in ("", FULL):
        return replace(rope, parameters={})
    parameters = dict(rope.parameters)
    if "short_factor" in parameters:
        parameters["long_factor"] = parameters["short_factor"]
    return replace(rope, parameters=parameters)


def _of_olmo(config: ModelConfig, kind: str, rope: RopeParameters) -> RopeParameters:
    """Windows have the base and no scaling."""
    written = config.written
    scaling = written.get("rope_scaling") or {} if kind in ("", FULL) else {}
    return replace(rope, base=float(written.get("rope_theta", 10000.0)), parameters=scaling)


def _longest(config: ModelConfig) -> int | None:
    parameters = parameters_in(config.completed)
    factor = parameters.get("factor") or 1
    if TRAINED in parameters or scaling_of(parameters) == "llama3":
        factor = 1
    return int(factor * (first(config.completed, LENGTHS) or DEFAULT_LENGTH))


SGLANG = Engine(
    name="SGLang",
    option="sglang",
    release="0.5.23",
    files="srt/layers/rotary_embedding, srt/utils, models/step3p5.py",
    read="2026-11",
    packages=("sglang",),
    kinds={
        **USUAL,
        "dynamic": _dynamic,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": _yarn,
        "deepseek_yarn": _latent_yarn,
        **{OF_TRANSFORMERS.format(kind): rule for kind, rule in TRANSFORMERS.kinds.items()},
    },
    ropes=_ropes,
    longest=_longest,
)
