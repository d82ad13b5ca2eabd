"""Rules of llama.cpp for the files of its converter."""

from __future__ import annotations

from dataclasses import replace

from posenc.evaluation.engines.config import FULL, ModelConfig
from posenc.evaluation.engines.engine import Engine
from posenc.evaluation.engines.rotation import Rope, Rotation, linear, llama3, plain
from posenc.integrations.transformers.checkpoints.rope import TRAINED

BARE = frozenset({"gpt_neox", "phi", "gemma", "gemma2", "minicpm3"})
"""Families of which neither base nor scaling is converted."""

UNSCALED = frozenset({"cohere", "cohere2", "deepseek", "exaone_moe", "phi3", "phimoe"})
"""Families of which YaRN and linear scaling are not converted."""

LLAMA3 = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "mixtral", "granite", "granitemoe", "arcee", "smollm3"),
            *("apertus", "nemotron-nas", "llama4_text", "ministral3", "granitemoehybrid"),
        ),
        "beside",
    ),
    **dict.fromkeys(("exaone", "exaone4", "exaone_moe"), "in"),
}
"""Families of which llama3's factors are converted; the trained length is read beside the
parameters, and is 8,192 where it is not there, or read in them."""

LONG = frozenset({"phi3", "phimoe"})
"""Families of which LongRoPE's factors are converted."""

LOGARITHM = {"ministral3": 1.0, "mistral4": 1.0}
"""Families with a gain by ``mscale_all_dim``, and ``mscale``; with latent attention the two are
taken as equal."""

UNTOLD = 8192
"""The trained length of llama3 where it finds none."""

NAMES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2")},
    **{name: name for name in ("olmoe", "glm4", "granite", "granitemoe", "smollm3", "cohere2")},
    **{name: name for name in ("exaone", "exaone4", "seed_oss", "stablelm", "starcoder2")},
    **{name: name for name in ("nemotron", "nemotron_h", "arcee", "apertus", "lfm2", "falcon")},
    **{name: name for name in ("phi3", "phimoe", "ernie4_5", "mistral4", "minicpm3", "bitnet")},
    **{name: name for name in ("afmoe", "deepseek", "dots1", "jais2")},
    **dict.fromkeys(("mistral", "mixtral"), "llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "cohere": "command-r",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "falcon_h1": "falcon-h1",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo2",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "nemotron-nas": "deci",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
}
"""Architectures of GGUF by ``model_type``."""


def _yarn(rope: Rope, length: int) -> Rotation:
    """``attention_factor`` is relative; the ramp's ends are whole pairs."""
    given = rope.parameters
    relative = given.get("attention_factor", given.get("attn_factor"))
    every = given.get("logarithm")
    gain = rope.usual_gain() if every is None else rope.quotient_gain(given["one"], every)
    return rope.yarn(gain * (1.0 if relative is None else float(relative)), truncate=True)


def _longrope(rope: Rope, length: int) -> Rotation:
    """One of the sides for all texts, by the context that is served: all of it by default."""
    return rope.longrope(rope.side(max(length, rope.longest)), rope.length_gain())


def _ropes(config: ModelConfig) -> dict[str, Rope]:
    return {kind: _converted(config, kind, rope) for kind, rope in config.ropes().items()}


def _converted(config: ModelConfig, layer_type: str, rope: Rope) -> Rope:
    family, given = config.family, dict(rope.parameters)
    none = replace(rope, parameters={})
    if family in BARE:
        return replace(none, base=10000.0)
    sliding = layer_type not in ("", FULL)
    if rope.kind == "default" or sliding:  # only the base of windows is converted
        return none
    if rope.kind == "llama3":
        place = LLAMA3.get(family)
        if place is None:
            return none
        trained = given.get(TRAINED) if place == "in" else config.completed.get(TRAINED)
        return replace(rope, trained=trained or UNTOLD)
    if rope.kind == "longrope":
        return rope if family in LONG else none
    if rope.kind == "proportional":
        return rope if family == "gemma4_text" else none
    if rope.kind not in ("linear", "yarn") or family in UNSCALED or not given.get("factor"):
        return none
    latent = config.completed.get("qk_rope_head_dim")
    every = given.get("mscale_all_dim")
    if every is not None and (latent or family in LOGARITHM):
        given |= {"logarithm": float(every), "one": LOGARITHM.get(family, float(every))}
    return replace(rope, parameters=given)


def _longest(config: ModelConfig) -> int | None:
    """Of Command R the length of its tokenizer, which is the trained one."""
    told = config.completed.get("model_max_length") if config.family == "cohere" else None
    return told or config.longest


LLAMA_CPP = Engine(
    name="llama.cpp",
    option="llama.cpp",
    source="llama.cpp master, conversion, gguf 0.19.0, src/llama-context.cpp, ggml's rope_yarn",
    read="2026-11",
    kinds={
        "default": plain,
        "linear": linear,
        "llama3": llama3,
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": _yarn,
    },
    ropes=_ropes,
    longest=_longest,
)
