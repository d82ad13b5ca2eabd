"""Rules of vLLM."""

from __future__ import annotations

from dataclasses import replace

from posenc.evaluation.engines.config import ModelConfig
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.rotation import Rope, Rotation, linear, llama3, plain
from posenc.evaluation.engines.transformers import yarn
from posenc.integrations.transformers.checkpoints.rope import TRAINED

UNSCALED = ("su", "longrope", "llama3")
"""Scalings whose factor does not count in the longest text."""


def latent_yarn(rope: Rope, length: int) -> Rotation:
    """YaRN of models with latent attention, whose ``mscale`` is 1 and ``mscale_all_dim`` 0."""
    gain = rope.quotient_gain(rope.number("mscale", 1.0), rope.number("mscale_all_dim", 0.0))
    return rope.yarn(gain * rope.number("attn_factor", 1.0), truncate=True)


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


def _longrope(rope: Rope, length: int) -> Rotation:
    """One of the sides for all texts, by the longest that is served."""
    side = rope.side(max(length, rope.longest))
    return rope.longrope(side, rope.number(f"{side}_mscale", rope.length_gain()))


def _longest(config: ModelConfig) -> int | None:
    longest: float | None = config.longest
    ropes = config.ropes()
    if longest is None:
        return None
    if any(rope.kind == "longrope" for rope in ropes.values()):
        return int(config.completed.get(TRAINED) or longest)
    if "gemma3" in config.family:
        return int(longest)
    factor = 1.0
    for rope in ropes.values():
        if rope.kind not in UNSCALED:
            factor = rope.number("factor", factor)
        if rope.kind == "yarn":
            longest = rope.length
    return int(longest * factor)


VLLM = Engine(
    name="vLLM",
    option="vllm",
    source="vLLM main, layers/rotary_embedding, transformers_utils/config.py, config/model.py",
    read="2026-11",
    kinds={
        "default": plain,
        "linear": linear,
        # one base for all texts, that of the trained length (vllm 41277)
        "dynamic": plain,
        "llama3": llama3,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": yarn,
        "deepseek_yarn": latent_yarn,
    },
    ropes=latent_ropes,
    longest=_longest,
)
