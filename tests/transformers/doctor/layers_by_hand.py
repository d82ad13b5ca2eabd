"""Layers of default configs, read from transformers' modeling code by hand.

Each line is a number of layers, what a token sees (``causal``, ``full``, ``window N`` tokens,
``BACK|AHEAD``, ``chunk N``, ``cross``, or the class instead of attention) and how positions enter
(pairing, features and base of a rotation, ``nope``, ``input``, or a bias).
"""

from __future__ import annotations

from posenc.transformers.doctor.facts import AttentionFacts, LayerReading, RotationFacts

BY_HAND: dict[str, tuple[str, ...]] = {
    "afmoe": ("24 window 1024: half 128 10000", "8 causal: nope"),
    "apertus": ("32 causal: half 128 scaled",),
    "arcee": ("32 causal: half 80 10000",),
    "bamba": ("32 BambaMixer",),
    "bart": ("12 full: input", "12 causal: input", "12 cross: nope"),
    "bert": ("12 full: input",),
    "biogpt": ("24 causal: input",),
    "bitnet": ("30 causal: half 128 500000",),
    "bloom": ("2 causal: linear",),
    "codegen": ("28 causal: adjacent 64 10000",),
    "cohere": ("40 causal: adjacent 128 500000",),
    "cohere2": ("30 window 4096: adjacent 128 10000", "10 causal: nope"),
    "deepseek_v2": ("32 causal: adjacent 64 10000",),
    "deepseek_v3": ("61 causal: half 64 10000",),
    "dory": (
        *("12 window 1024: half 256 10000", "4 causal: half 256 10000000"),
        *("15 window 1024: half 256 10000", "5 causal: half 256 10000000"),  # run twice
    ),
    "ernie4_5": ("18 causal: adjacent 128 500000",),
    "exaone": ("32 causal: half 128 500000",),
    "exaone4": ("24 window 4096: half 128 10000", "8 causal: nope"),
    "falcon": ("32 causal: half 64 10000",),
    "falcon_h1": ("32 causal: half 128 10000",),
    "gemma": ("28 causal: half 256 10000",),
    "gemma2": ("13 window 4096: half 256 10000", "13 causal: half 256 10000"),
    "gemma3_text": ("22 window 4096: half 256 10000", "4 causal: half 256 1000000"),
    "glm": ("40 causal: adjacent 64 10000",),
    "glm4": ("40 causal: adjacent 64 10000",),
    "gpt2": ("12 causal: input",),
    "gpt_bigcode": ("12 causal: input",),
    "gpt_neo": ("12 causal: input", "12 window 256: input"),
    "gpt_neox": ("44 causal: half 24 10000",),
    "gpt_oss": ("18 window 128: half 64 scaled sinks", "18 causal: half 64 scaled sinks"),
    "gptj": ("28 causal: adjacent 64 10000",),
    "granite": ("32 causal: half 128 10000",),
    "granitemoe": ("32 causal: half 128 10000",),
    "helium": ("24 causal: adjacent 128 100000",),
    "jamba": ("28 JambaMambaMixer", "4 causal: nope"),
    "jetmoe": ("12 causal: half 128 10000",),
    "lfm2": ("32 causal: half 80 1000000",),
    "lara_mini": (
        *("14 LaraMiniGatedDeltaNet", "13 window 512: half 128 10000", "7 causal: nope"),
    ),
    "llama": ("32 causal: half 128 10000",),
    "llama4_text": ("36 chunk 8192: adjacent 128 500000", "12 causal: nope temperature"),
    "mamba": ("32 MambaMixer",),
    "mamba2": ("64 Mamba2Mixer",),
    "minimax": ("16 causal: half 128 1000000", "16 MiniMaxLightningAttention"),
    "mistral": ("32 window 4096: half 128 10000",),
    "mixtral": ("32 causal: half 128 1000000",),
    "modernbert": ("8 full: half 64 160000", "14 64|64: half 64 10000"),
    "modernbert-decoder": ("8 causal: half 64 160000", "14 window 64: half 64 10000"),
    "mpt": ("24 causal: linear",),
    "olmo": ("32 causal: half 128 10000",),
    "olmo2": ("32 causal: half 128 10000",),
    "olmo3": ("24 window 4096: half 128 500000", "8 causal: half 128 500000"),
    "olmoe": ("16 causal: half 128 10000",),
    "opt": ("12 causal: input",),
    "persimmon": ("36 causal: half 32 10000",),
    "phi": ("24 causal: half 32 10000",),
    "phi3": ("32 causal: half 96 10000",),
    "phimoe": ("32 causal: half 128 1000000",),
    "qwen2": ("32 causal: half 128 10000",),
    "qwen2_moe": ("24 causal: half 128 10000",),
    "qwen3": ("32 causal: half 128 10000",),
    "qwen3_moe": ("24 causal: half 64 10000",),
    "qwen3_next": ("36 Qwen3NextGatedDeltaNet", "12 causal: half 64 10000"),
    "recurrent_gemma": ("18 RecurrentGemmaRecurrentBlock", "8 window 2048: half 128 10000"),
    "roberta": ("12 full: input",),
    "roformer": ("12 full: adjacent 64 10000",),
    "sarvam_mla": ("32 causal: half 64 10000",),
    "sarvam_moe": ("19 causal: half 64 8000000",),
    "seed_oss": ("64 causal: half 128 10000",),
    "smollm3": ("27 causal: half 128 2000000", "9 causal: nope"),
    "stablelm": ("32 causal: half 20 10000",),
    "starcoder2": ("30 causal: half 128 10000",),
    "t5": ("6 full: by offset", "6 causal: by offset", "6 cross: nope"),
    "vaultgemma": ("13 window 4096: half 256 10000", "13 causal: half 256 10000"),
    "xglm": ("24 causal: input",),
    "zamba2": ("45 Zamba2MambaMixer", "9 causal: nope"),
}


def summary(reading: LayerReading) -> tuple[str, ...]:
    """The lines of a reading."""
    return tuple(f"{len(layers.numbers)} {_summary(layers.attention)}" for layers in reading.layers)


def _summary(facts: AttentionFacts) -> str:
    if facts.kind == "none":
        return " ".join(facts.instead)
    sees = "causal" if facts.causal is True else "full" if facts.causal is False else "unknown"
    if facts.kind == "cross":
        sees = "cross"
    elif isinstance(facts.chunk, int):
        sees = f"chunk {facts.chunk}"
    elif facts.back is not None:
        sees = f"window {facts.back + 1}" if facts.ahead == 0 else f"{facts.back}|{facts.ahead}"
    words = [f"{sees}: {_positions(facts)}"]
    words += ["sinks"] * (facts.sinks is True)
    words += ["temperature"] * (facts.temperature not in ({}, "unknown"))
    return " ".join(words)


def _positions(facts: AttentionFacts) -> str:
    rotation = facts.rotation
    if isinstance(rotation, RotationFacts):
        base = "scaled" if rotation.base is None else f"{float(f'{rotation.base:.4g}'):.0f}"
        return f"{rotation.pairing} {rotation.features} {base}"
    if facts.bias is not None:
        return facts.bias
    return "input" if facts.absolute is True and facts.kind == "self" else "nope"
