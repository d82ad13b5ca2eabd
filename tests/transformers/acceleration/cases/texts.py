"""Models of texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import InklingConfig, InklingForConditionalGeneration, MptModel, PreTrainedModel
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from tests.support.tiny_models import build
from tests.transformers.acceleration.case import (
    ENCODER,
    VOCABULARY,
    Case,
    of,
    seeing,
    texts,
    whole_texts,
)

WORDS = {"vocab_size": VOCABULARY}

BLOOM: dict[str, Any] = WORDS | {"hidden_size": 24, "n_layer": 2, "n_head": 3}

MPT: dict[str, Any] = WORDS | {"d_model": 24, "n_layers": 2, "n_heads": 3, "max_seq_len": 64}

FALCON: dict[str, Any] = WORDS | {"hidden_size": 24, "num_hidden_layers": 2}
FALCON |= {"num_attention_heads": 3, "alibi": True, "multi_query": False}
FALCON |= {"attn_implementation": "sdpa"}

MPNET: dict[str, Any] = WORDS | ENCODER | {"max_position_embeddings": 40}

DEBERTA: dict[str, Any] = MPNET | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DEBERTA |= {"position_biased_input": False}

DEBERTA_V2: dict[str, Any] = DEBERTA | {"position_buckets": 8, "max_relative_positions": 16}
DEBERTA_V2 |= {"share_att_key": True, "norm_rel_ebd": "layer_norm"}

FUNNEL: dict[str, Any] = WORDS | {"block_sizes": [1, 2], "num_decoder_layers": 1, "d_model": 24}
FUNNEL |= {"n_head": 3, "d_head": 8, "d_inner": 32}

XLNET: dict[str, Any] = WORDS | {"d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 32}
XLNET |= {"dropout": 0.1}

T5: dict[str, Any] = WORDS | {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2}
T5 |= {"num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
LONG_T5 = T5 | {"local_radius": 4, "global_block_size": 4}
SWITCH = T5 | {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1}
SWITCH |= {"num_sparse_decoder_layers": 1, "num_experts": 2, "router_jitter_noise": 0.0}

INKLING: dict[str, Any] = WORDS | ENCODER | {"pad_token_id": 0, "num_attention_heads": 6}
INKLING |= {"layer_types": ["hybrid", "hybrid_sliding"], "mlp_layer_types": ["dense", "dense"]}
INKLING |= {"num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4}
INKLING |= {"swa_num_key_value_heads": 4, "swa_head_dim": 6, "d_rel": 5, "rel_extent": 12}
INKLING |= {"sliding_window_size": 9, "log_scaling_n_floor": 9, "log_scaling_alpha": 0.6}
EXPERTS: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4}
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def pairs() -> dict[str, Tensor]:
    """Two texts, and the texts to be generated, one of them padded."""
    inputs = texts()
    generated = inputs["input_ids"].flip(1)[:, :11]
    attended = torch.ones_like(generated)
    attended[1, 7:] = 0
    return inputs | {"decoder_input_ids": generated, "decoder_attention_mask": attended}


def long() -> dict[str, Tensor]:
    return texts(600)


def clipped() -> PreTrainedModel:
    """A model that clips queries, keys and values, and scales logits by a number of its own."""
    return build(MptModel, MPT, attn_config=MptAttentionConfig(clip_qkv=0.5, softmax_scale=0.3))


def multimodal() -> PreTrainedModel:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    config = InklingConfig(
        text_config=INKLING,
        vision_config=vision,
        audio_config={"n_mel_bins": 2, "mel_vocab_size": 4},
        image_token_id=1,
        audio_token_id=2,
    )
    return InklingForConditionalGeneration(config)


def numbered(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in two segments with a class token, as tokenizers number them."""
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[:, 9:] = 1
    kinds[1, 16] = 2
    return inputs | {"token_type_ids": kinds}


def segments() -> dict[str, Tensor]:
    """Padded texts of two segments after a class token."""
    inputs = numbered(texts(24))
    inputs["token_type_ids"][:, 0] = 2
    return inputs


def three_types() -> dict[str, Tensor]:
    inputs = segments()
    inputs["token_type_ids"][:, 13:] = 5
    return inputs


def one_type() -> dict[str, Tensor]:
    """A class token and one segment."""
    kinds = torch.zeros(2, 23, dtype=torch.long)
    kinds[:, 0] = 2
    return whole_texts() | {"token_type_ids": kinds}


def marked() -> dict[str, Tensor]:
    """Texts of two segments, a class token at the end, and padding."""
    inputs = numbered(texts())
    kinds = inputs["token_type_ids"]
    kinds[0, -1] = 2
    return inputs | {"token_type_ids": kinds.where(inputs["attention_mask"].bool(), 3)}


def memories() -> dict[str, Any]:
    """Texts of two segments after 5 earlier tokens."""
    generator = torch.Generator().manual_seed(2)
    return marked() | {"mems": list(torch.randn(2, 5, 2, 24, generator=generator))}


def whole_memories() -> dict[str, Any]:
    return whole_texts() | {"mems": memories()["mems"]}


def queried() -> dict[str, Any]:
    """Texts of which 3 tokens are to be predicted from all others."""
    inputs = texts()
    mapping = torch.zeros(2, 3, inputs["input_ids"].shape[1])
    mapping[:, 0, 7] = mapping[:, 1, 10] = mapping[:, 2, 11] = 1.0
    return inputs | {"target_mapping": mapping}


def permuted() -> dict[str, Any]:
    """The same, where the tokens are hidden from each other."""
    inputs = queried()
    hidden = inputs["target_mapping"].sum(1)  # [B, L]
    return inputs | {"perm_mask": hidden.unsqueeze(1).expand(-1, hidden.shape[1], -1)}


def one_segment() -> dict[str, Any]:
    return whole_texts() | {"token_type_ids": torch.zeros(2, 23, dtype=torch.long)}


GROUPED = {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}
WIDE, COLD = {"sliding_window_size": 70, "rel_extent": 100}, {"log_scaling_n_floor": None}
MANY = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 64}
EAGER, SDPA = ({"attn_implementation": name} for name in ("eager", "sdpa"))
ABSOLUTE = {"relative_attention": False, "position_biased_input": True}
BLOCKS = {"block_sizes": [1, 1, 2], "block_repeats": [1, 2, 1]}
"""Three blocks, the second of which runs twice."""

CASES = {
    "bloom": {
        "padded": Case(of("BloomModel", BLOOM), compared=seeing, accelerated=2),
        "whole": Case(of("BloomModel", BLOOM), whole_texts),
        "long": Case(of("BloomModel", BLOOM, n_layer=1), long, seeing),
        "power_of_two": Case(of("BloomModel", BLOOM, n_head=4), compared=seeing),
        "lm": Case(of("BloomForCausalLM", BLOOM), compared=seeing),
    },
    "falcon": {
        "padded": Case(of("FalconModel", FALCON), compared=seeing, accelerated=2),
        "whole": Case(of("FalconModel", FALCON), whole_texts),
        "eager": Case(of("FalconModel", FALCON, **EAGER), compared=seeing),
        "long": Case(of("FalconModel", FALCON, num_hidden_layers=1), long, seeing),
        "one_key_head": Case(of("FalconModel", FALCON, multi_query=True), compared=seeing),
        "grouped": Case(of("FalconModel", FALCON, **GROUPED), compared=seeing),
        "lm": Case(of("FalconForCausalLM", FALCON), compared=seeing),
    },
    "mpt": {
        "padded": Case(of("MptModel", MPT), compared=seeing, accelerated=4),
        "whole": Case(of("MptModel", MPT), whole_texts),
        "long": Case(of("MptModel", MPT, n_layers=1, max_seq_len=600), long, seeing),
        "power_of_two": Case(of("MptModel", MPT, n_heads=4), compared=seeing),
        "clipped": Case(clipped, compared=seeing),
        "lm": Case(of("MptForCausalLM", MPT), compared=seeing),
    },
    "deberta": {
        "padded": Case(of("DebertaModel", DEBERTA), accelerated=3),
        "whole": Case(of("DebertaModel", DEBERTA), whole_texts),
        "masked_lm": Case(of("DebertaForMaskedLM", DEBERTA)),
        "beyond_the_span": Case(of("DebertaModel", DEBERTA, max_relative_positions=7)),
        "long": Case(of("DebertaModel", DEBERTA, num_hidden_layers=1), long),
        "c2p": Case(of("DebertaModel", DEBERTA, pos_att_type=["c2p"])),
        "p2c": Case(of("DebertaModel", DEBERTA, pos_att_type=["p2c"])),
        "without_terms": Case(of("DebertaModel", DEBERTA, pos_att_type=[])),
        "without_relative_attention": Case(of("DebertaModel", DEBERTA, **ABSOLUTE)),
    },
    "deberta_v2": {
        "v3": Case(of("DebertaV2Model", DEBERTA_V2), accelerated=3),
        "whole": Case(of("DebertaV2Model", DEBERTA_V2), whole_texts),
        "masked_lm": Case(of("DebertaV2ForMaskedLM", DEBERTA_V2)),
        "own_projections": Case(of("DebertaV2Model", DEBERTA_V2, share_att_key=False)),
        "c2p": Case(of("DebertaV2Model", DEBERTA_V2, pos_att_type=["c2p"], share_att_key=False)),
        "p2c": Case(of("DebertaV2Model", DEBERTA_V2, pos_att_type=["p2c"])),
        "no_buckets": Case(of("DebertaV2Model", DEBERTA_V2, position_buckets=-1)),
        "without_relative_attention": Case(of("DebertaV2Model", DEBERTA_V2, **ABSOLUTE)),
        "long": Case(of("DebertaV2Model", DEBERTA_V2, num_hidden_layers=1), long),
        "convolution": Case(of("DebertaV2Model", DEBERTA_V2, conv_kernel_size=3)),
    },
    "mpnet": {
        "model": Case(of("MPNetModel", MPNET), accelerated=3),
        "whole": Case(of("MPNetModel", MPNET), whole_texts),
        "masked_lm": Case(of("MPNetForMaskedLM", MPNET)),
    },
    "funnel": {
        "padded": Case(of("FunnelModel", FUNNEL), accelerated=6),
        "whole": Case(of("FunnelModel", FUNNEL), whole_texts),
        "segments": Case(of("FunnelModel", FUNNEL), segments),
        "three_types": Case(of("FunnelModel", FUNNEL), three_types),
        "one_type": Case(of("FunnelModel", FUNNEL), one_type),
        "long": Case(of("FunnelModel", FUNNEL, block_sizes=[1, 1]), long),
        "no_class_token": Case(of("FunnelModel", FUNNEL, separate_cls=False), segments),
        "not_truncated": Case(of("FunnelModel", FUNNEL, truncate_seq=False), segments),
        "keys_pooled": Case(of("FunnelModel", FUNNEL, pool_q_only=False), segments),
        "largest_of_two": Case(of("FunnelModel", FUNNEL, pooling_type="max"), segments),
        "blocks": Case(of("FunnelBaseModel", FUNNEL, **BLOCKS), segments),
        "masked_lm": Case(of("FunnelForMaskedLM", FUNNEL), segments),
    },
    "inkling": {
        "padded": Case(of("InklingTextModel", INKLING), compared=seeing, accelerated=4),
        "whole": Case(of("InklingTextModel", INKLING), whole_texts),
        "eager": Case(of("InklingTextModel", INKLING, **EAGER), whole_texts),
        "padded_eager": Case(of("InklingTextModel", INKLING, **EAGER), compared=seeing),
        "long": Case(of("InklingTextModel", INKLING, **WIDE), long, seeing),
        "without_temperature": Case(of("InklingTextModel", INKLING, **COLD), compared=seeing),
        "experts": Case(of("InklingTextModel", INKLING, **EXPERTS), compared=seeing),
        "lm": Case(of("InklingForCausalLM", INKLING), compared=seeing),
        "multimodal": Case(multimodal, compared=seeing),
    },
    "xlnet": {
        "padded": Case(of("XLNetModel", XLNET), accelerated=3),
        "whole": Case(of("XLNetModel", XLNET), whole_texts),
        "long": Case(of("XLNetModel", XLNET, n_layer=1), long),
        "segments": Case(of("XLNetModel", XLNET), marked),
        "one_segment": Case(of("XLNetModel", XLNET), one_segment),
        "memories": Case(of("XLNetModel", XLNET), memories),
        "whole_memories": Case(of("XLNetModel", XLNET), whole_memories),
        "kept": Case(of("XLNetModel", XLNET, mem_len=9), memories),
        "queried": Case(of("XLNetModel", XLNET), queried),
        "permuted": Case(of("XLNetModel", XLNET), permuted),
        "clamped": Case(of("XLNetModel", XLNET, clamp_len=6)),
        "both_directions": Case(of("XLNetModel", XLNET, bi_data=True), marked),
        "lm": Case(of("XLNetLMHeadModel", XLNET), marked),
    },
    "t5": {
        "eager": Case(of("T5Model", T5, **EAGER), pairs, accelerated=6),
        "sdpa": Case(of("T5Model", T5, **SDPA), pairs),
        "encoder": Case(of("T5EncoderModel", T5), accelerated=2),
        "many_buckets": Case(of("T5Model", T5, **MANY), pairs),
    },
    "mt5": {"model": Case(of("MT5Model", T5), pairs, accelerated=6)},
    "umt5": {
        "eager": Case(of("UMT5Model", T5, **EAGER), pairs, accelerated=6),
        "sdpa": Case(of("UMT5Model", T5, **SDPA), pairs),
    },
    "longt5": {
        kind: Case(of("LongT5Model", LONG_T5, encoder_attention_type=kind), pairs, accelerated=4)
        for kind in ("local", "transient-global")
    },
    "switch_transformers": {
        "model": Case(of("SwitchTransformersModel", SWITCH), pairs, accelerated=6)
    },
}
