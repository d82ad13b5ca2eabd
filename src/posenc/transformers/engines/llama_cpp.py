"""Rules of llama.cpp for the files of its converter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import (
    FULL,
    HUNYUAN,
    Engine,
    ModelConfig,
    NotServedError,
    first,
)
from posenc.transformers.engines.rotation import (
    ALPHA,
    USUAL,
    EngineRotation,
    RopeParameters,
    Rule,
    linear,
    ntk_alpha,
    without_mscale,
)
from posenc.transformers.engines.transformers import TRANSFORMERS

BARE = frozenset({"gpt_neox", "phi", "gemma", "gemma2", "minicpm3", "stablelm", "falcon", "glm"})
"""Families of which neither base nor scaling is converted."""

UNSCALED = frozenset(
    {"cohere", "cohere2", "cohere2_moe", "deepseek", "exaone_moe", "phi3", "phimoe", "bitnet"}
    | {"falcon_h1", "nemotron-nas"}
)
"""Families of which YaRN and linear scaling are not converted."""

LINEAR = frozenset({"nemotron"})
"""Families of which any factor is converted as that of linear scaling."""

LLAMA3 = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "arcee",
        "apertus",
        "nemotron-nas",
        "llama4_text",
        "granite_swa",
    }
    | {"iquestcoder", "internlm3", "exaone", "exaone4", "exaone_moe", "step3p5"}
)
"""Families of which llama3's factors are converted."""

NO_TENSOR = "its {} no tensor of llama3's factors in this model"
NOT_LLAMA3 = {
    **dict.fromkeys(
        ("afmoe", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid"),
        NO_TENSOR.format("converter has"),
    ),
    "smollm3": NO_TENSOR.format("loader takes"),
}
"""Families whose converter, or the program itself, fails with llama3 scaling, and how."""

GLOBAL = frozenset({"mellum", "olmo3"})
"""Families whose windows rotate by the base of the other layers."""

LONG = frozenset({"phi3", "phimoe", "minicpm3"})
"""Families of which LongRoPE's factors are converted."""

YARN_ALONE = frozenset({"ministral3"})
"""Families of which nothing else is converted."""

RAMPS = frozenset({"ministral3"})
"""Families that read the ends of YaRN's ramp; the others' are 32 and 1 turns."""

LOGARITHM = {"ministral3": 1.0, "mistral4": 1.0, "deepseek_v32": 1.0}
"""Families with a gain by ``mscale_all_dim``, and ``mscale``; with latent attention the two are
taken as equal."""

LATENT = frozenset({"deepseek2", "deepseek32", "glm-dsa"})
"""Architectures with latent attention whose scale of all logits has YaRN's gain."""

KEY = "gguf_attn_factor"
"""The value of ``rope.scaling.attn_factor``, a key of GGUF, among the parameters of a config.

The loader of every model reads it, its converter writes it for LongRoPE alone, and
``--override-kv`` of the server sets it; YaRN's usual gain is multiplied by it.
"""

TENSOR = "tensor"
"""Scaling of a file with factors of its own, such as those that llama3's is converted to."""

DEFAULT_LENGTH = 8192
"""The trained length of llama3 where it finds none."""

HUNYUAN_LENGTHS = (32768, 262144)
"""Longest texts of the configs of Hunyuan that are converted; the file says the longer one."""

FALCON = 2048
"""Longest text of every Falcon."""

NAMES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2")},
    **{name: name for name in ("olmoe", "glm4", "granite", "granitemoe", "smollm3", "cohere2")},
    **{name: name for name in ("exaone", "exaone4", "seed_oss", "stablelm", "starcoder2")},
    **{name: name for name in ("nemotron", "nemotron_h", "arcee", "apertus", "lfm2", "falcon")},
    **{name: name for name in ("phi3", "phimoe", "ernie4_5", "mistral4", "minicpm3", "bitnet")},
    **{name: name for name in ("afmoe", "deepseek", "dots1", "jais2")},
    **{name: name for name in ("granite_swa", "laguna", "mellum", "hy_v3")},
    **dict.fromkeys(("mistral", "mixtral", "iquestcoder", "internlm3"), "llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    **dict.fromkeys(("kimi_k2", "kimi_k25"), "deepseek2"),
    "cohere": "command-r",
    "cohere2_moe": "cohere2moe",
    "deepseek_v32": "deepseek32",
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
    "granitemoeshared": "granitemoe",
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
    "solar_open": "glm4moe",
    "step3p5": "step35",
}
"""Architectures of GGUF by ``model_type``."""


def architecture(config: ModelConfig) -> str:
    """Architecture of a file of GGUF, ``ARCH`` if it is not known.

    The converter goes by the class, which transformers 5 names after Llama in some families.
    """
    if "LlamaForCausalLM" in (config.root.get("architectures") or ()):
        return "llama"
    return NAMES.get(config.family, "ARCH")


def _linear(rope: RopeParameters, length: int) -> EngineRotation:
    """Linear scaling, with YaRN's usual scale of logits in models with latent attention."""
    scale = rope.usual_gain() ** 2 if rope.parameters.get("latent") else 1.0
    return replace(linear(rope, length), scale=scale)


def _yarn(rope: RopeParameters, length: int) -> EngineRotation:
    """YaRN without ``attention_factor``, with a ramp between integer pairs.

    Models with latent attention scale all logits by the gain once more.
    """
    parameters = rope.parameters
    every = parameters.get("logarithm")
    gain = rope.usual_gain() if every is None else rope.quotient_gain(parameters["one"], every)
    gain *= rope.number(KEY, 1.0)
    rotation = rope.yarn(gain, truncate=True)
    return replace(rotation, scale=gain**2) if parameters.get("latent") else rotation


def _tensor(rope: RopeParameters, length: int) -> EngineRotation:
    """Frequencies divided by the factors of a file."""
    pairs = zip(rope.frequencies(), rope.parameters["factors"], strict=True)
    return EngineRotation(tuple(theta / by / rope.number("factor", 1.0) for theta, by in pairs))


def _with_key(rule: Rule) -> Rule:
    """A rule with the gain of ``KEY``."""

    def scaled(rope: RopeParameters, length: int) -> EngineRotation:
        rotation = rule(rope, length)
        return replace(rotation, gain=rotation.gain * rope.number(KEY, 1.0))

    return scaled


def _longrope(rope: RopeParameters, length: int) -> EngineRotation:
    """One of the sides for all texts, by the context that is served: all of it by default."""
    return rope.longrope(rope.side_of_all(length), rope.number(KEY, rope.length_gain()))


def _ropes(config: ModelConfig) -> dict[str, RopeParameters]:
    return {kind: _converted(config, kind, rope) for kind, rope in config.ropes().items()}


def _converted(config: ModelConfig, layer_type: str, rope: RopeParameters) -> RopeParameters:
    family, parameters = config.family, dict(rope.parameters)
    none = replace(rope, parameters={})
    if config.completed.get("qk_rope_head_dim"):
        none = replace(none, parameters=without_mscale(rope))
    if family in BARE:
        none = replace(none, base=10000.0)
    if family in YARN_ALONE and rope.kind != "yarn":
        raise NotServedError("its converter takes this model with YaRN alone")
    sliding = layer_type not in ("", FULL)
    if sliding and family in GLOBAL:
        return replace(none, base=config.ropes()[FULL].base)
    if rope.kind == "default" or sliding:  # only the base of windows is converted
        return none
    if rope.kind == "llama3" and family in NOT_LLAMA3:
        raise NotServedError(NOT_LLAMA3[family])
    if family in HUNYUAN and rope.kind == "dynamic":
        alpha = rope.number("alpha", 1000.0 if family == "hunyuan_v1_moe" else 50.0)
        usual = rope.base == 10000 and rope.longest in HUNYUAN_LENGTHS
        if not usual or (family == "hunyuan_v1_moe" and (alpha, rope.head) != (1000, 128)):
            raise NotServedError("its converter takes this model with its released base and length")
        return replace(none, parameters={"rope_type": ALPHA, "alpha": alpha})
    if family in LINEAR:
        return replace(none, parameters={**parameters, "rope_type": "linear"})
    if rope.kind == "llama3":
        trained = parameters.get(TRAINED) or rope.trained or DEFAULT_LENGTH
        return replace(rope, trained=trained) if family in LLAMA3 else none
    if rope.kind == "longrope":
        # of a family without a trained length, the short factors serve all texts
        short = replace(none, parameters=parameters, trained=rope.longest)
        return short if family in BARE & LONG else rope if family in LONG else none
    if rope.kind == "proportional":
        return rope if family == "gemma4_text" else none
    scaled = rope.kind in ("linear", "yarn") and parameters.get("factor")
    if not scaled or family in UNSCALED | BARE:
        return none
    return replace(
        rope, parameters=_read(config, parameters), trained=parameters.get(TRAINED) or rope.trained
    )


def _read(config: ModelConfig, parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters of YaRN as the program reads those of its files."""
    family, every = config.family, parameters.get("mscale_all_dim")
    if family not in RAMPS:
        parameters = {k: v for k, v in parameters.items() if not k.startswith("beta_")}
    latent = config.completed.get("qk_rope_head_dim")
    if NAMES.get(family) in LATENT:
        parameters["latent"] = True
    if every is not None and (latent or family in LOGARITHM):
        parameters |= {"logarithm": float(every), "one": LOGARITHM.get(family, float(every))}
    return parameters


def _longest(config: ModelConfig) -> int | None:
    """The default context: Command R's is its tokenizer's length, the trained one; GLM's its width.

    ``-c`` sets another one.
    """
    if config.family == "falcon":
        return FALCON
    if config.family == "glm":
        length = first(config.completed, ("seq_length", "hidden_size"))
        return None if length is None else int(length)
    if config.family in HUNYUAN and any(rope.kind == "dynamic" for rope in config.ropes().values()):
        return HUNYUAN_LENGTHS[1]
    tokenizer_length = (
        config.completed.get("model_max_length") if config.family == "cohere" else None
    )
    return tokenizer_length or config.longest


def _with_gain(config: ModelConfig) -> ModelConfig:
    """The config with ``KEY`` for the gain that transformers has, where it is YaRN's of all layers.

    With latent attention the key changes the scale of all logits too, so that it is left out.
    """
    rope = config.ropes().get("")
    if rope is None or rope.kind != "yarn" or config.completed.get("qk_rope_head_dim"):
        return config
    try:
        if _ropes(config)[""].kind != "yarn":  # the key scales logits of every model
            return config
        gains = [
            engine.rotations(config, rope.length)[""].gain for engine in (TRANSFORMERS, LLAMA_CPP)
        ]
    except NotServedError:
        return config
    if math.isclose(*gains, rel_tol=1e-6):
        return config
    parameters = {**rope.parameters, KEY: gains[0] / gains[1]}
    return replace(config, completed={**config.completed, "rope_parameters": parameters})


LLAMA_CPP = Engine(
    name="llama.cpp",
    option="llama.cpp",
    release="0c1e57098",
    files="conversion, src/llama-context.cpp, src/models, ggml's rope_yarn",
    read="2026-11",
    kinds={
        **{kind: _with_key(rule) for kind, rule in USUAL.items()},
        ALPHA: ntk_alpha,
        TENSOR: _with_key(_tensor),
        "linear": _with_key(_linear),
        "longrope": _longrope,
        "proportional": lambda rope, length: rope.proportional(1.0),
        "yarn": _yarn,
    },
    ropes=_ropes,
    longest=_longest,
    with_options=_with_gain,
)
