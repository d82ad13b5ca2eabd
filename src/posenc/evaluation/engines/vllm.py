"""Rules of vLLM."""

from __future__ import annotations

from dataclasses import replace

from posenc.evaluation.engines.config import ModelConfig
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.rotation import Rope, Rotation, linear, llama3, ntk_alpha, plain
from posenc.evaluation.engines.transformers import yarn
from posenc.integrations.transformers.checkpoints.rope import TRAINED

SCALED_ALREADY = ("longrope", "llama3", "yarn", "deepseek_yarn")
"""Scalings whose factor ``max_position_embeddings`` has already."""


def latent_yarn(rope: Rope, length: int) -> Rotation:
    """YaRN of models with latent attention, whose ``mscale`` is 1 and ``mscale_all_dim`` 0."""
    gain = rope.quotient_gain(rope.number("mscale", 1.0), rope.number("mscale_all_dim", 0.0))
    return rope.yarn(gain, truncate=True)


def latent_ropes(config: ModelConfig) -> dict[str, Rope]:
    """Models with latent attention have a YaRN of their own."""
    ropes = config.ropes()
    if not config.completed.get("qk_rope_head_dim"):
        return ropes
    return {
        kind: replace(rope, parameters={**rope.parameters, "rope_type": "deepseek_yarn"})
        if rope.kind == "yarn"
        else rope
        for kind, rope in ropes.items()
    }


def _dynamic(rope: Rope, length: int) -> Rotation:
    """One base for all texts: by ``alpha``, else of the longest; that is trained unless told."""
    if "alpha" in rope.parameters:
        return ntk_alpha(rope, length)
    trained = rope.number("max_trained_positions", rope.longest)
    return rope.ntk(rope.factor * rope.longest / trained - (rope.factor - 1))


def _longrope(rope: Rope, length: int) -> Rotation:
    """One of the sides for all texts, by the longest that is served."""
    side = rope.side(max(length, rope.longest))
    return rope.longrope(side, rope.number(f"{side}_mscale", rope.length_gain()))


def _longest(config: ModelConfig) -> int | None:
    longest = config.completed.get("model_max_length") or config.longest
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
    source="vLLM 0.33.0, layers/rotary_embedding, transformers_utils/config.py, config/model.py",
    read="2026-11",
    kinds={
        "default": plain,
        "linear": linear,
        "dynamic": _dynamic,
        "llama3": llama3,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": yarn,
        "deepseek_yarn": latent_yarn,
    },
    ropes=latent_ropes,
    longest=_longest,
)
