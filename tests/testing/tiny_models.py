"""Models of transformers from tiny configs, of any model type, and inputs for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

LENGTH, WINDOW, VOCABULARY = 29, 7, 120
"""Tokens of a row, and the sizes of windows and vocabularies."""

MOST = 20_000_000
"""Parameters of a model that counts as tiny."""

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "text_vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim"), 32),
    **dict.fromkeys(("embedding_size", "emb_dim", "word_embed_dim", "width", "projection_dim"), 32),
    **dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_hidden_size"), 32),
    **dict.fromkeys(("encoder_hidden_size", "hidden_channels", "d_embed", "out_hidden_size"), 32),
    **dict.fromkeys(("cross_attention_hidden_size", "rotary_dim_size", "latent_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim", "d_inner"), 48),
    **dict.fromkeys(
        ("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("dff", "dense_intermediate_size", "encoder_intermediate_size"), 48),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "decoder_intermediate_size"), 24
    ),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "attention_head_dim", "d_kv", "global_head_dim"), 8
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), WINDOW),
    "attention_chunk_size": 8,
    "local_attention": 8,
    "query_pre_attn_scalar": 8,
    **dict.fromkeys(("image_size", "img_size", "input_size"), 32),
    "patch_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "global_attn_every_n_layers": 2,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("text_hidden_size", "codebook_dim"), 32),
    "n_input_layers": 1,
    "n_output_layers": 0,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
}
"""Sizes by the names that configs have for them; those that a config lacks are left out."""


class Unbuilt(Exception):
    """A model type that no tiny model is known of, with the reason."""


def kinds() -> list[str]:
    """All model types that ``AutoModel`` makes models of."""
    return sorted(kind for kind in MODEL_MAPPING_NAMES if kind in CONFIG_MAPPING)


def tiny_config(kind: str) -> PreTrainedConfig:
    """The config of a type with small sizes, the first and the last kind of its layers included."""
    return _tiny(CONFIG_MAPPING[kind])


def _tiny(kind: type[PreTrainedConfig], most: int = 4) -> PreTrainedConfig:
    default = kind()
    options = {name: size for name, size in SIZES.items() if _has(default, name)}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig) and most:
            options[name] = _tiny(type(part), most - 1).to_dict()
    patterns = getattr(default, "layer_types", None)
    if patterns and "num_hidden_layers" in options and _settable(kind, "layer_types"):
        options["layer_types"] = ([*dict.fromkeys(patterns)] * 2)[: max(2, len(set(patterns)))]
        options["num_hidden_layers"] = len(options["layer_types"])
    if getattr(default, "use_sliding_window", None) is False:
        options["use_sliding_window"] = True
    if "kv_lora_rank" in options:  # latent attention has as many heads of keys as of queries
        options["num_key_value_heads"] = options["num_attention_heads"]
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        options["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
    return kind(**options)


def _has(config: PreTrainedConfig, name: str) -> bool:
    """True if the config has a size of that name, or leaves one open."""
    if not _settable(type(config), name):
        return False
    try:
        value = getattr(config, name)
    except Exception:  # one that differs from layer to layer
        return False
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _settable(kind: type[PreTrainedConfig], name: str) -> bool:
    member = getattr(kind, name, None)
    return not (isinstance(member, property) and member.fset is None)


def tiny_model(kind: str) -> PreTrainedModel:
    """A model with random weights, in eager attention.

    Raises:
        Unbuilt: if there is none.
    """
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            count = sum(x.numel() for x in AutoModel.from_config(config).parameters())
    except Exception as error:
        raise Unbuilt(f"no tiny config: {first_line(error)}") from error
    if count > MOST:
        raise Unbuilt(f"{count:,} parameters with a tiny config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = AutoModel.from_config(config, attn_implementation="eager").eval()
        except Exception as error:
            raise Unbuilt(f"not built: {first_line(error)}") from error
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(model: PreTrainedModel, *, padding: str | None = None) -> dict[str, Tensor]:
    """Random inputs of two rows, of which the second has padding on the left or the right.

    Raises:
        Unbuilt: for models of other inputs than texts, images and sounds.
    """
    generator, config = torch.Generator().manual_seed(0), model.config
    name = model.main_input_name
    if name == "input_ids":
        ids = torch.randint(3, VOCABULARY - 20, (2, LENGTH), generator=generator)
        inputs = {"input_ids": ids}
        if padding is not None:
            mask = torch.ones_like(ids)
            mask[1, slice(0, 9) if padding == "left" else slice(LENGTH - 9, LENGTH)] = 0
            inputs["attention_mask"] = mask
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, 5:]
        return inputs
    if padding is not None:
        raise Unbuilt("no padding of this input")
    vision = getattr(config, "vision_config", None) or config
    if name == "pixel_values":
        size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        return {name: torch.randn(2, channels or 3, *size, generator=generator)}
    if name == "input_values":
        return {name: torch.randn(2, 4000, generator=generator)}
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(
            config, "feature_projection_input_dim", 80
        )
        frames = 2 * getattr(config, "max_source_positions", 64)
        shape = (2, bins, frames) if hasattr(config, "num_mel_bins") else (2, 48, bins)
        inputs = {name: torch.randn(shape, generator=generator)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(3, 90, (2, 12), generator=generator)
        return inputs
    raise Unbuilt(f"no inputs of this kind are made: {name}")


def first_line(error: Exception) -> str:
    """The type of an error and the beginning of its message."""
    with suppress(IndexError):
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return type(error).__name__
