"""Rules of OpenVINO, for models that optimum-intel exports.

It traces the code of transformers on a short text, so that what depends on the length of a text is
as in that one; LongRoPE is replaced by operations that are traced whole.
"""

from __future__ import annotations

from dataclasses import replace

from posenc.transformers.engines.config import Engine, ModelConfig, NotServedError, UnreadError
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters, plain
from posenc.transformers.engines.transformers import TRANSFORMERS

EXPORTED = frozenset(
    {"afmoe", "arcee", "cohere", "cohere2", "falcon", "glm4", "gpt_neox", "gpt_neox_japanese"}
    | {"gpt_oss", "granite", "granitemoe", "granitemoehybrid", "hunyuan_v1_dense", "llama"}
    | {"mistral", "mixtral", "olmo", "olmo2", "persimmon", "phi", "phi3", "phimoe", "qwen2"}
    | {"qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Families that rotate, of those that it exports."""

OLDER = {
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "minicpm", "minicpm3"), "4.53"),
    **dict.fromkeys(("bitnet", "dbrx", "exaone", "exaone4", "internlm2", "llama4"), "4.57"),
    **dict.fromkeys(("llama4_text", "qwen3_next", "xverse", "zamba2"), "4.57"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"), "5.0"),
    "glm": "5.0",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "5.2"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "5.4"),
}
"""Families that it exports with older releases of transformers, and the last of them."""

TRACED = frozenset({"gpt_oss", "olmo2"})
"""Families whose LongRoPE is not replaced, which cannot be traced."""

INTERLEAVED = frozenset({"cohere", "cohere2"})
"""Families whose pairs are of neighbouring features; the LongRoPE that replaces theirs is of
half-split pairs."""


def has_export(family: str) -> bool:
    """True if optimum-intel exports this ``model_type``."""
    return family in EXPORTED or family in OLDER


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """A gain of each side is read before the one of both."""
    rotation = TRANSFORMERS.kinds["longrope"](rope, length)
    if any(rope.parameters.get(f"{side}_mscale") is None for side in ("long", "short")):
        return rotation
    return replace(rotation, gain=float(rope.parameters[f"{rope.side(length)}_mscale"]))


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    family = config.family
    if config.nested:
        raise UnreadError("its models of images and text have not been run")
    if family in OLDER:
        raise NotServedError(f"its exporter takes this model with transformers {OLDER[family]}")
    if family not in EXPORTED:
        raise NotServedError(f"its exporter has no model {family}")
    ropes = TRANSFORMERS.ropes(config)
    if family in TRACED and any(rope.kind == "longrope" for rope in ropes.values()):
        raise NotServedError("its exporter cannot trace the LongRoPE of this model")
    if family in INTERLEAVED and any(rope.kind == "longrope" for rope in ropes.values()):
        raise UnreadError("LongRoPE turns the two features of a pair by different angles")
    return dict(ropes)


OPENVINO = Engine(
    name="OpenVINO",
    option="openvino",
    release="2026.4.1",
    files="exporters/openvino of optimum-intel 2.2.0, with transformers 5.5.4",
    read="2026-11",
    packages=("openvino",),
    kinds={**TRANSFORMERS.kinds, "dynamic": plain, "longrope": _longrope},
    ropes=_ropes,
    longest=lambda config: None,
)
