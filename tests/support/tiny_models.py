"""Tiny models of transformers' types, with random weights, from their configs' names alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128

COUNTS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "embedding_size", "d_model", "n_embd", "dim", "lru_width"), 64),
    **dict.fromkeys(("text_hidden_size", "codebook_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts_per_token", "moe_topk", "moe_k", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_groups", "sliding_window_pattern", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "loop_layer_index_end", "loop_num_passes"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "index_n_heads"), 4),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"), 4),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("head_dim", "v_head_dim", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "ssm_state_size", "global_head_dim"), 16),
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("bos_token_id", "cls_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("n_input_layers", "n_layers_per_attn_res_block", "loop_layer_index_start"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers", "pad_token_id"), 0),
    "n_output_layers": 0,
    "sliding_window": 7,
    "intermediate_size_mlp": 48,
}
"""Sizes by the names that configs have for them."""


PARTIAL = frozenset({"sliding_attention", "linear_attention", "mamba", "conv", "recurrent"})
"""Types of layers beside which a model has others, if it has enough layers."""

NEEDED = frozenset({"head_dim", "num_key_value_heads", "vocab_size"})
"""Names that have no default in some configs."""


def build(
    kind: str | type[PreTrainedModel], sizes: dict[str, Any], **options: Any
) -> PreTrainedModel:
    """A model of a class, or of one of transformers by its name, with a config of these fields."""
    model = getattr(transformers, kind) if isinstance(kind, str) else kind
    return model(model.config_class(**sizes | options))


def word_tokenizer(words: Sequence[str], unknown: str = "[UNK]") -> Tokenizer:
    """Words by their places in a list."""
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(WordLevel(numbers, unk_token=unknown))
    made.pre_tokenizer = Whitespace()
    return made


def tiny_config(kind: str, **sizes: Any) -> Any:
    """A config of a model type; names that it does not have are left out."""
    config = CONFIG_MAPPING[kind]
    try:
        return _tiny(config, sizes)
    except Exception:  # of types without groups of heads
        return _tiny(config, {"num_key_value_heads": 4, **sizes})


def _tiny(kind: type[Any], sizes: dict[str, Any]) -> Any:
    usual = kind()
    names = set(inspect.signature(kind.__init__).parameters) | set(usual.to_dict())
    names |= set(usual.attribute_map)
    given: dict[str, Any] = {
        k: x for k, x in COUNTS.items() if k in names and (k in NEEDED or _has(usual, k))
    }
    for name in usual.attribute_map:  # by one of two names
        if name in given and usual.attribute_map[name] in given:
            del given[name]
    for name in usual.sub_configs:
        if _has(usual, name):
            given[name] = _tiny(type(getattr(usual, name)), {}).to_dict()
    if "qk_rope_head_dim" in given:  # latent attention, without groups of heads
        given |= {"head_dim": given["qk_rope_head_dim"], "num_key_value_heads": 4}
    rope = getattr(usual, "rope_parameters", None) or {}
    given |= _sections(rope, given.get("head_dim", 16))
    config = kind(**given | sizes)
    types = list(getattr(config, "layer_types", None) or [])
    if types and set(types) <= PARTIAL and "layer_types" not in sizes:
        try:
            config = kind(**given | {"layer_types": [*types[:-1], "full_attention"]} | sizes)
        except Exception:  # a type without such layers
            return config
    return config


def _sections(rope: Any, head_dim: int) -> dict[str, Any]:
    """Rope parameters whose pairs for each axis are as many as a small head has."""
    sections = rope.get("mrope_section")
    if sections is None:
        return {}
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    return {"rope_parameters": {**rope, "mrope_section": _shares(sections, pairs)}}


def _shares(sections: Sequence[int], pairs: int) -> list[int]:
    """So many pairs in about these proportions."""
    shares = [max(1, pairs * part // sum(sections)) for part in sections]
    return [pairs - sum(shares[1:]), *shares[1:]]


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # a size that differs between layers
        return False


def tiny_model(kind: str, **sizes: Any) -> PreTrainedModel:
    """A model of a type, with larger weights than at the start of training."""
    config = tiny_config(kind, **sizes)
    torch.manual_seed(0)
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    for part in model.modules():
        sections = getattr(part, "mrope_section", None)
        if sections is not None and sum(sections) != part.inv_freq.numel():
            part.mrope_section = _shares(sections, part.inv_freq.numel())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()  # type: ignore[no-any-return]
