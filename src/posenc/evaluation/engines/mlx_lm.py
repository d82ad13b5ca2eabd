"""Rules of mlx-lm, which reads ``config.json`` as it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posenc.evaluation.engines.config import FULL, ModelConfig
from posenc.evaluation.engines.engine import Engine, NotServedError
from posenc.evaluation.engines.rotation import (
    ALPHA,
    Rope,
    Rotation,
    linear,
    llama3,
    ntk_alpha,
    plain,
)
from posenc.integrations.transformers.checkpoints.rope import TRAINED

REQUIRED = None
BESIDE: dict[str, float | None] = {
    **dict.fromkeys(("llama", "mistral", "smollm3", "seed_oss", "bitnet", "olmo2", "olmoe"), 1e4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), 1e4),
    **dict.fromkeys(("afmoe", "internlm3", "mimo", "iquestcoder"), 1e4),
    "qwen2": 1e6,
    "gemma3_text": 1e6,
    "gpt_oss": 150000.0,
    "falcon_h1": 1e11,
    "glm4_moe_lite": 1e6,
    "exaone_moe": 1e6,
    "nemotron-nas": 5e5,
    "youtu": 1.6e6,
    **dict.fromkeys(("phi3", "hunyuan_v1_dense"), 1e4),
    **dict.fromkeys(("apertus", "dots1", "exaone4", "granite", "granitemoe"), REQUIRED),
    **dict.fromkeys(("llama4", "longcat_flash"), REQUIRED),
    **dict.fromkeys(("olmo3", "qwen3", "qwen3_next"), REQUIRED),
}
"""Families that read ``rope_scaling`` and, beside it, ``rope_theta``; its default, if any."""

UNSCALED: dict[str, float | None] = {
    **dict.fromkeys(("gemma", "gemma2", "glm", "olmo", "phi", "nemotron", "deepseek"), 1e4),
    "granitemoehybrid": 1e4,
    "llama4_text": REQUIRED,
    "mixtral": 1e6,
    "qwen2_moe": 1e6,
    "starcoder2": 1e5,
    "cohere": 8e6,
    "cohere2": 5e4,
    **dict.fromkeys(("glm4", "glm4_moe", "qwen3_moe", "ernie4_5", "ernie4_5_moe"), REQUIRED),
    **dict.fromkeys(("helium", "stablelm", "minimax", "minimax_m2", "gemma3n_text"), REQUIRED),
    **dict.fromkeys(("recurrent_gemma", "gpt_neox", "mimo_v2_flash"), REQUIRED),
    "lfm2": 1e6,
    "lfm2_moe": 1e6,
}
"""Families that read a base and no scaling."""

LINEAR = frozenset({"deepseek", "nemotron"})
"""Families of these that read linear scaling, by its ``type``."""

LINEAR_ALONE = frozenset({"nemotron", "qwen2_moe"})
"""Families that do not start with another one."""

BASE_INSIDE = frozenset({"lfm2", "lfm2_moe", "exaone_moe", "granitemoehybrid"})
"""Families that prefer the base in ``rope_parameters``."""

INSIDE_TOO = frozenset({"qwen3"})
"""Families that read base and scaling there if they are not beside it."""

INSIDE = frozenset(
    {"ministral3", "gemma4_text", "laguna", "mellum", "qwen3_5_text", "qwen3_5_moe_text"}
    | {"glm_moe_dsa", "mistral4"}
)
"""Families that read ``rope_parameters`` with the base in it."""

PARTIAL = {
    "phi": 0.4,
    "nemotron": 0.5,
    "phi3": 1.0,
    "glm4_moe_lite": 1.0,
    **dict.fromkeys(("glm4", "glm4_moe", "stablelm", "qwen3_next", "mimo_v2_flash"), 1.0),
}
"""Families that read ``partial_rotary_factor``, and its default; others rotate whole heads."""

UNTOLD = {"llama3": 8192, "yarn": 4096}
"""Trained lengths where it finds none."""

PHI3 = ("longrope", "su", "linear")
"""Scalings of Phi-3, that leaves others out."""


STEP = "step3p5"
"""Family that reads base and rotated share of each layer."""


def has_model(family: str) -> bool:
    """Whether it has a model of a ``model_type``."""
    return family == STEP or family in INSIDE or family in BESIDE or family in UNSCALED


def _yarn(rope: Rope, length: int) -> Rotation:
    """``attention_factor`` is not read; the ramp's ends are whole pairs."""
    gain = rope.quotient_gain(rope.number("mscale", 1.0), rope.number("mscale_all_dim", 0.0))
    return rope.yarn(gain, truncate=True)


def _ropes(config: ModelConfig) -> dict[str, Rope]:
    family, standard = config.family, config.ropes()
    if family == STEP:
        return {kind: _told(rope) for kind, rope in _of_step(config, standard).items()}
    if family in INSIDE:
        return {kind: _told(rope) for kind, rope in standard.items()}
    if family == "llama4_text" and config.nested:
        family = "llama4"
    known = BESIDE if family in BESIDE else UNSCALED
    if family not in known:
        raise NotServedError(f"it has no model {family}")
    written, inside = config.written, config.written.get("rope_parameters")
    inside = inside if isinstance(inside, Mapping) else {}
    named = "rotary_emb_base" if family == "gpt_neox" else "rope_theta"
    bases = [written.get(named), known[family]]
    if family in INSIDE_TOO:
        bases.insert(1, inside.get("rope_theta"))
    if family in BASE_INSIDE:
        bases.insert(0, inside.get("rope_theta"))
    base = next((base for base in bases if base is not None), None)
    if base is None:
        raise NotServedError("config.json has no rope_theta beside the parameters")
    scaling = written.get("rope_scaling") or (inside if family in INSIDE_TOO else None)
    given = scaling if isinstance(scaling, Mapping) else {}
    kind = given.get("type")
    if family == "hunyuan_v1_dense" and given:
        if not {"alpha", "factor", "type"} <= given.keys():
            raise NotServedError("it takes a scaling of this model with alpha, factor and type")
        given = {"type": ALPHA, "alpha": given["alpha"]}
    if given and family in LINEAR_ALONE and kind != "linear":
        raise NotServedError("it knows linear scaling of this model alone")
    read = known is BESIDE or (family in LINEAR and kind == "linear")
    if not read or (family == "phi3" and kind not in PHI3):
        given = {}
    return {
        kind: _beside(config, kind, rope, float(base), given) for kind, rope in standard.items()
    }


def _of_step(config: ModelConfig, standard: Mapping[str, Rope]) -> dict[str, Rope]:
    """The scaling is that of the layer types in ``yarn_only_types``, or of all without them."""
    scaling = config.written.get("rope_scaling") or {}
    scaled = config.written.get("yarn_only_types") or standard
    ropes = {}
    for kind, rope in standard.items():
        named = {"rope_type": "default", **(scaling if kind in scaled else {})}
        ropes[kind] = replace(rope, parameters=named, trained=named.get(TRAINED))
    return ropes


def _beside(
    config: ModelConfig, kind: str, rope: Rope, base: float, given: Mapping[str, Any]
) -> Rope:
    """Windows are not scaled, and those of Gemma 3 have a base of their own."""
    windowed = kind not in ("", FULL)
    if windowed and config.family == "gemma3_text":
        base = float(config.written.get("rope_local_base_freq", 1e4))
    share = 1.0
    if config.family == "gpt_neox":
        if "rotary_pct" not in config.written:
            raise NotServedError("config.json has no rotary_pct")
        share = config.written["rotary_pct"]
    elif config.family in PARTIAL:
        share = config.written.get("partial_rotary_factor", PARTIAL[config.family])
    latent = config.completed.get("qk_rope_head_dim")
    width = rope.width if latent else int(rope.head * share)
    # here ``type`` comes before ``rope_type``
    named = {**given, "rope_type": given.get("type") or given.get("rope_type") or "default"}
    trained = config.written.get(TRAINED) if config.family == "phi3" else given.get(TRAINED)
    own = replace(rope, base=base, width=width, trained=trained)
    return _told(replace(own, parameters={} if windowed else named))


def _told(rope: Rope) -> Rope:
    trained = rope.parameters.get(TRAINED, UNTOLD.get(rope.kind))
    return rope if rope.trained else replace(rope, trained=trained)


MLX_LM = Engine(
    name="mlx-lm",
    option="mlx",
    source="mlx-lm 0.32.2, models/rope_utils.py and the files of the models",
    read="2026-11",
    kinds={
        "default": plain,
        "mrope": plain,
        "linear": linear,
        "dynamic": lambda rope, length: rope.dynamic(length),
        "llama3": llama3,
        ALPHA: ntk_alpha,
        "longrope": lambda rope, length: rope.longrope("long", rope.length_gain()),
        "su": lambda rope, length: rope.longrope("long", rope.length_gain()),
        "proportional": lambda rope, length: rope.proportional(rope.number("factor", 1.0)),
        "yarn": _yarn,
        "deepseek_yarn": _yarn,
    },
    ropes=_ropes,
    longest=lambda config: None,
)
