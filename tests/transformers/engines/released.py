"""RoPE's fields of released models, and where each was confirmed (``SOURCES``).

LongRoPE's factors are made up (``_factors``), of the released number. Of a config that is
confirmed, the base, the rotated width, the scaling and the longest text are the released ones.
"""

from __future__ import annotations

from typing import Any

TRAINED = "original_max_position_embeddings"


def _of(
    family: str, heads: int, width: int, longest: int, theta: float | None = None, **more: Any
) -> dict[str, Any]:
    """Fields of a model with so many heads of a width."""
    fields = {
        "model_type": family,
        "num_attention_heads": heads,
        "hidden_size": heads * width,
        "head_dim": width,
        "max_position_embeddings": longest,
        **({} if theta is None else {"rope_theta": theta}),
        **more,
    }
    return {name: value for name, value in fields.items() if value != "no"}


def _yarn(factor: float, trained: int, kind: str = "rope_type", **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {kind: "yarn", "factor": factor, TRAINED: trained, **more}}


def _llama3(factor: float, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, TRAINED: 8192}
    return {"rope_scaling": scaling | {"low_freq_factor": low, "high_freq_factor": high}}


def _factors(pairs: int) -> dict[str, Any]:
    short = [1.0 + 0.05 * t for t in range(pairs)]
    long = [1.0 + 60.0 * t / pairs for t in range(pairs)]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    return {"rope_scaling": scaling, TRAINED: 4096}


LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512}
SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {
    "sliding_attention": SLIDING,
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25,
    },
}
MINISTRAL = {
    "rope_type": "yarn",
    "factor": 16.0,
    TRAINED: 16384,
    "rope_theta": 1e6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
QWEN35 = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
GPT_OSS = _yarn(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "kind": "type"}
OLMO3 = _yarn(8.0, 8192, attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0)

RELEASED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _of("qwen3", 16, 128, 40960, 1e6, hidden_size=1024),
    "Qwen3-8B": _of("qwen3", 32, 128, 40960, 1e6),
    "Qwen3-8B, YaRN of its card": _of("qwen3", 32, 128, 131072, 1e6, **_yarn(4.0, 32768)),
    "Qwen3-30B-A3B": _of("qwen3_moe", 32, 128, 40960, 1e6, hidden_size=2048),
    "Qwen3-30B-A3B, YaRN": _of(
        "qwen3_moe", 32, 128, 131072, 1e6, hidden_size=2048, **_yarn(4.0, 32768)
    ),
    "Qwen3-235B-A22B-Instruct-2507": _of("qwen3_moe", 64, 128, 262144, 5e6, hidden_size=4096),
    "Qwen3-Next-80B-A3B": _of(
        "qwen3_next", 16, 256, 262144, 1e7, hidden_size=2048, partial_rotary_factor=0.25
    ),
    "Qwen3.5": {
        "model_type": "qwen3_5",
        "text_config": _of("qwen3_5_text", 16, 256, 262144, rope_parameters=QWEN35),
    },
    "Qwen2.5-7B-Instruct": _of("qwen2", 28, 128, 32768, 1e6, head_dim="no"),
    "Qwen2.5-14B": _of("qwen2", 40, 128, 131072, 1e6, head_dim="no"),
    "Qwen2.5-72B-Instruct, YaRN of its card": _of(
        "qwen2", 64, 128, 32768, 1e6, head_dim="no", **_yarn(4.0, 32768, "type")
    ),
    "Qwen2.5-7B-Instruct-1M": _of("qwen2", 28, 128, 1010000, 1e7, head_dim="no"),
    "Qwen1.5-MoE-A2.7B": _of("qwen2_moe", 16, 128, 8192, 1e6, head_dim="no"),
    "DeepSeek-R1-Distill-Qwen-7B": _of("qwen2", 28, 128, 131072, 1e4, head_dim="no"),
    "Llama-2-7B": _of("llama", 32, 128, 4096, head_dim="no"),
    "Yarn-Llama-2-7B-128k": _of(
        "llama", 32, 128, 131072, head_dim="no", **_yarn(32.0, 4096, "type", finetuned=True)
    ),
    "Llama-3-8B": _of("llama", 32, 128, 8192, 5e5, head_dim="no"),
    "Llama-3.1-8B": _of("llama", 32, 128, 131072, 5e5, head_dim="no", **_llama3(8.0)),
    "Llama-3.1-70B": _of("llama", 64, 128, 131072, 5e5, head_dim="no", **_llama3(8.0)),
    "Llama-3.2-1B": _of("llama", 32, 64, 131072, 5e5, **_llama3(32.0)),
    "Llama-3.2-3B": _of("llama", 24, 128, 131072, 5e5, **_llama3(32.0)),
    "Llama-3.3-70B": _of("llama", 64, 128, 131072, 5e5, head_dim="no", **_llama3(8.0)),
    "Llama-4-Scout": {
        "model_type": "llama4",
        "text_config": _of("llama4_text", 40, 128, 10485760, 5e5, **_llama3(16.0, 1.0, 1.0)),
    },
    "Llama-4-Maverick": {
        "model_type": "llama4",
        "text_config": _of("llama4_text", 40, 128, 1048576, 5e5, rope_scaling=None),
    },
    "DeepSeek-Coder-6.7B": _of(
        "llama", 32, 128, 16384, 1e5, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "Falcon3-7B": _of("llama", 12, 256, 32768, 1000042),
    "SmolLM2-1.7B": _of("llama", 32, 64, 8192, 130000),
    "SmolLM3-3B": _of("smollm3", 16, 128, 65536, 5e6, head_dim="no"),
    "Mistral-7B-v0.1": _of("mistral", 32, 128, 32768, 1e4, head_dim="no"),
    "Mistral-7B-v0.3": _of("mistral", 32, 128, 32768, 1e6, head_dim="no"),
    "Mistral-Nemo-Base-2407": _of("mistral", 32, 128, 128000, 1e6, hidden_size=5120),
    "Mixtral-8x7B": _of("mixtral", 32, 128, 32768, 1e6, head_dim="no"),
    "Mixtral-8x22B": _of("mixtral", 48, 128, 65536, 1e6, head_dim="no"),
    "Ministral-3-8B": _of("ministral3", 32, 128, 262144, rope_parameters=MINISTRAL),
    "Phi-2": _of("phi", 32, 80, 2048, 1e4, head_dim="no", partial_rotary_factor=0.4),
    "Phi-3-mini-4k": _of("phi3", 32, 96, 4096, 1e4, head_dim="no", **{TRAINED: 4096}),
    "Phi-3-mini-128k": _of("phi3", 32, 96, 131072, 1e4, head_dim="no", **_factors(48)),
    "Phi-3.5-mini": _of("phi3", 32, 96, 131072, 1e4, head_dim="no", **_factors(48)),
    "Phi-4": _of("phi3", 40, 128, 16384, 250000, head_dim="no", **{TRAINED: 16384}),
    "Phi-4-mini": _of(
        *("phi3", 24, 128, 131072, 1e4), head_dim="no", partial_rotary_factor=0.75, **_factors(48)
    ),
    "Gemma-2B": _of("gemma", 8, 256, 8192, 1e4),
    "Gemma-2-9B": _of("gemma2", 16, 256, 8192, 1e4, hidden_size=3584),
    "Gemma-3-1B": _of(
        "gemma3_text", 4, 256, 32768, 1e6, hidden_size=1152, rope_local_base_freq=1e4
    ),
    "Gemma-3-4B": {
        "model_type": "gemma3",
        "text_config": _of(
            *("gemma3_text", 8, 256, 131072, 1e6),
            hidden_size=2560,
            rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
    },
    "Gemma-4": _of(*("gemma4_text", 8, 256, 131072), rope_parameters=GEMMA4, global_head_dim=512),
    "gpt-oss-20b": _of("gpt_oss", 64, 64, 131072, 150000, hidden_size=2880, **GPT_OSS),
    "gpt-oss-120b": _of(
        "gpt_oss", 64, 64, 131072, 150000, hidden_size=2880, num_hidden_layers=36, **GPT_OSS
    ),
    "DeepSeek-V2-Lite": _of(
        *("deepseek_v2", 16, 128, 163840, 1e4),
        head_dim="no",
        **LATENT,
        **_yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707, **DEEPSEEK),
    ),
    "DeepSeek-V3": _of(
        *("deepseek_v3", 128, 56, 163840, 1e4),
        head_dim="no",
        **LATENT,
        **_yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK),
    ),
    "Kimi-K2": _of(
        *("deepseek_v3", 64, 112, 131072, 5e4),
        head_dim="no",
        **LATENT,
        **_yarn(32.0, 4096, "type", mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),
    ),
    "GLM-4-9B": _of("glm", 32, 128, 131072, 5e6, partial_rotary_factor=0.5),
    "GLM-4-9B-0414": _of("glm4", 32, 128, 32768, 1e4, partial_rotary_factor=0.5),
    "GLM-4.5-Air": _of(
        *("glm4_moe", 96, 128, 131072, 1e6),
        hidden_size=4096,
        partial_rotary_factor=0.5,
        rope_scaling=None,
    ),
    "GLM-4.7-Flash": _of(
        *("glm4_moe_lite", 20, 102, 202752, 1e6), **LATENT, head_dim="no", hidden_size=2048
    ),
    "OLMo-2-7B": _of("olmo2", 32, 128, 4096, 5e5, head_dim="no"),
    "Olmo-3-7B": _of("olmo3", 32, 128, 65536, 5e5, head_dim="no", **OLMO3),
    "granite-3.3-8b": _of("granite", 32, 128, 131072, 1e7, head_dim="no"),
    "EXAONE-4.0-32B": _of("exaone4", 40, 128, 131072, 1e6, **_llama3(16.0)),
    "Command R": _of("cohere", 64, 128, 8192, 8e6, head_dim="no", model_max_length=131072),
    "Command R7B": _of("cohere2", 32, 128, 132096, 5e4),
    "StableLM-2-1.6B": _of(
        "stablelm", 32, 64, 4096, 1e4, head_dim="no", partial_rotary_factor=0.25
    ),
    "Pythia-6.9B": _of(
        "gpt_neox", 32, 128, 2048, head_dim="no", rotary_pct=0.25, rotary_emb_base=10000
    ),
    "StarCoder2-3B": _of("starcoder2", 24, 128, 16384, 999999.4420358813, head_dim="no"),
    "Nemotron-Mini-4B": _of("nemotron", 24, 128, 4096, 1e4, partial_rotary_factor=0.5),
    "Seed-OSS-36B": _of("seed_oss", 80, 128, 524288, 1e7, hidden_size=5120),
    "ERNIE-4.5-0.3B": _of("ernie4_5", 16, 128, 131072, 5e5, hidden_size=1024),
    "LFM2-1.2B": _of("lfm2", 32, 64, 128000, 1e6, head_dim="no"),
    "Apertus-8B": _of("apertus", 32, 128, 65536, 12e6, head_dim="no", **_llama3(8.0)),
}

SOURCES: dict[str, frozenset[str]] = {
    "litgpt 0.5.13, config.py": frozenset(
        {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B-Instruct-2507"}
        | {"Qwen2.5-7B-Instruct-1M", "Llama-2-7B", "Llama-3-8B", "Llama-3.1-8B", "Llama-3.2-1B"}
        | {"Llama-3.2-3B", "Llama-3.3-70B", "Falcon3-7B", "SmolLM2-1.7B", "Mistral-7B-v0.3"}
        | {"Mixtral-8x7B", "Phi-2", "Phi-3-mini-4k", "Phi-3-mini-128k", "Phi-4", "Phi-4-mini"}
        | {"Gemma-2B", "Gemma-2-9B", "Gemma-3-4B", "OLMo-2-7B", "Pythia-6.9B"}
        | {"Mistral-7B-v0.1", "Mixtral-8x22B", "Llama-3.1-70B", "Qwen2.5-14B"}
    ),
    "transformers 5.23, defaults of the model's configuration": frozenset(
        {"gpt-oss-20b", "gpt-oss-120b", "Apertus-8B", "Ministral-3-8B", "LFM2-1.2B"}
        | {"ERNIE-4.5-0.3B", "GLM-4.7-Flash"}
    ),
    "config.json as public repositories quoted it in 2026": frozenset(
        {"Qwen2.5-7B-Instruct", "Qwen3.5", "DeepSeek-V3", "DeepSeek-V2-Lite", "Kimi-K2"}
        | {"Gemma-3-1B", "Gemma-4", "Command R", "Command R7B", "Olmo-3-7B", "SmolLM3-3B"}
        | {"Phi-3.5-mini", "granite-3.3-8b", "StableLM-2-1.6B", "StarCoder2-3B", "Seed-OSS-36B"}
        | {"Llama-4-Scout", "Llama-4-Maverick", "DeepSeek-R1-Distill-Qwen-7B", "GLM-4.5-Air"}
        | {"Mistral-Nemo-Base-2407", "GLM-4-9B"}
    ),
    "TensorRT-LLM, tests of EXAONE 4": frozenset({"EXAONE-4.0-32B"}),
    "the scaling that the model's card recommends": frozenset(
        {"Qwen3-8B, YaRN of its card", "Qwen3-30B-A3B, YaRN"}
        | {"Qwen2.5-72B-Instruct, YaRN of its card"}
    ),
    "MaxText, qwen3-next-80b-a3b.yml, and the keys of its GGUF as llama.cpp printed them "
    "(lmstudio-bug-tracker, issue 1266)": frozenset({"Qwen3-Next-80B-A3B"}),
    "": frozenset(
        {"Qwen1.5-MoE-A2.7B", "Yarn-Llama-2-7B-128k"}
        | {"DeepSeek-Coder-6.7B", "Nemotron-Mini-4B", "GLM-4-9B-0414"}
    ),
}
"""Models by source; those of "" are written from memory and serve as shapes of configs.

GLM-4-9B's base is 10,000 times the ``rope_ratio`` of its config.json, 500.
"""
