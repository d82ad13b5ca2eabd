"""Layers of a model with RoPE that rotate, and that see windows only, as its config tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

ROTATES = (
    "apertus", "arcee", "beam", "bitnet", "cohere", "cwm", "dbrx", "deepseek_v2", "deepseek_v3",
    "diffllama", "ernie4_5", "ernie4_5_moe", "eurobert", "falcon", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "gpt_neox_japanese", "gpt_oss", "granite", "granitemoe", "gte", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "jetmoe", "llama", "mimo_v2_flash", "minicpm3", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert", "modernbert-decoder", "nanochat", "nemotron", "nomic_bert",
    "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text",
    "seed_oss", "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""``model_type`` of models whose layers all rotate, but those without ``rope_parameters``."""

HYBRID = (
    "bailing_hybrid", "lfm2", "lfm2_moe", "lfm3", "minimax", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Of models that rotate in layers with attention, which are not all."""

IN_WINDOWS = ("afmoe", "cohere2", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Of models that rotate in layers with a window only."""

BY_LAYER: Mapping[str, str] = {
    "granite_swa": "layer_rope_theta",
    "granitemoe_swa": "layer_rope_theta",
    "llama4_text": "no_rope_layers",
    "mistral_large4_text": "no_rope_layers",
    "muse_glimmer_text": "layer_rope_theta",
    "muse_spark_text": "layer_rope_theta",
    "smollm3": "no_rope_layers",
}
"""Field with a value for every layer, which is 0 or null where it does not rotate."""

WINDOWED = ("ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")
"""Of models whose layers all have the window of ``sliding_window``."""

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
WINDOWS = ("sliding_attention", "chunked_attention")
OTHERS = {"linear_attention": "linear attention", "conv": "convolution"}
"""``layer_types`` of attention, of attention in windows, and of other layers in words."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that encode positions alike.

    Args:
        layer_type: in ``layer_types``; "" where there are none.
        rotates: None: not known.
        windowed: a token sees a window or chunk only; None: not known.
    """

    layer_type: str
    rotates: bool | None
    windowed: bool | None

    @property
    def other(self) -> str:
        """Kind of a layer that is not attention, in words; else ""."""
        return OTHERS.get(self.layer_type, "")


def layer_kinds(config: Config) -> Counter[LayerKind]:
    """The number of layers of each kind, in their order; one of 0 layers if that is not known."""
    family, count = str(config.get("model_type")), layer_count(config)
    types = _of_layers(config.get("layer_types"), count)
    if types is None:
        windowed = _windowed(config, family)
        return Counter({LayerKind("", _rotates(config, family), windowed): count or 0})
    values = _of_layers(config.get(BY_LAYER.get(family, "")), count)
    kinds: Counter[LayerKind] = Counter()
    for layer, layer_type in enumerate(types):
        windowed = layer_type in WINDOWS if layer_type in ATTENTION else None
        rotates = _rotates(config, family, layer_type)
        if family in BY_LAYER and values is not None:
            rotates = bool(values[layer])
        kinds[LayerKind(layer_type, rotates, windowed)] += 1
    return kinds


def layer_count(config: Config) -> int | None:
    """The number of layers; None where the config has none."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    types = config.get("layer_types")
    known = [config.get(name) for name in names] + [len(types) if isinstance(types, list) else None]
    return next((count for count in known if isinstance(count, int)), None)


def window_size(config: Config) -> int | None:
    """Tokens of a window or chunk; None where the config tells of none."""
    names = ("sliding_window", "attention_chunk_size", "local_attention")
    sizes = (config.get(name) for name in names)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _of_layers(values: object, count: int | None) -> Sequence[Any] | None:
    """A list with an item for every layer; None for anything else."""
    return values if isinstance(values, list) and values and len(values) == count else None


def _rotates(config: Config, family: str, layer_type: str = "") -> bool | None:
    if layer_type in OTHERS:
        return False
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and layer_type in nested and nested[layer_type] is None:
        return False
    if layer_type and layer_type not in ATTENTION:
        return None
    if family in ROTATES or (family in HYBRID and layer_type):
        return True
    if family in IN_WINDOWS and layer_type and config.get("sliding_window"):
        return layer_type == "sliding_attention"
    return None


def _windowed(config: Config, family: str) -> bool | None:
    """Whether layers without ``layer_types`` have windows."""
    if config.get("use_sliding_window") is False or window_size(config) is None:
        return False
    return True if family in WINDOWED else None
