"""Models and inputs of the comparison with transformers: base sizes, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.inkling.modeling_inkling import InklingAttention, InklingPreTrainedModel

VOCABULARY = 1000

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}


@dataclass(frozen=True)
class Model:
    """A family of the comparison.

    Args:
        make: makes a base model with a number of layers.
        inputs: makes inputs of a size: tokens, or pixels on a side.
    """

    make: Callable[[int], PreTrainedModel]
    inputs: Callable[[int], dict[str, Tensor]]


def text(length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY // 2, VOCABULARY, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def deberta(layers: int) -> PreTrainedModel:
    return transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            **BASE,
            num_hidden_layers=layers,
            relative_attention=True,
            position_buckets=256,
            max_relative_positions=512,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        )
    )


def mpnet(layers: int) -> PreTrainedModel:
    config = transformers.MPNetConfig(
        **BASE, num_hidden_layers=layers, max_position_embeddings=8200
    )
    return transformers.MPNetModel(config, add_pooling_layer=False)


def t5(layers: int) -> PreTrainedModel:
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=768, d_ff=3072, num_heads=12, num_layers=layers
        )
    )


def t5_scoring(layers: int) -> PreTrainedModel:
    """With a decoder of as many layers."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=768, d_ff=3072, num_heads=12, num_layers=layers
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def scored(length: int) -> dict[str, Tensor]:
    """A text, and one token after the decoder's first."""
    return text(length) | {"decoder_input_ids": torch.tensor([[0, 7]])}


def save_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer whose words are ``t0``, ``t1`` … ``t<size - 1>``, in a model's folder."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(size)}, unk_token="t2"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2"
    ).save_pretrained(folder)


def funnel(layers: int) -> PreTrainedModel:
    """Blocks of as many layers, of which the second and the third pool."""
    config = transformers.FunnelConfig(vocab_size=VOCABULARY, block_sizes=[layers] * 3)
    return transformers.FunnelBaseModel(config)


def xlnet(layers: int) -> PreTrainedModel:
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=768, n_head=12, d_inner=3072, n_layer=layers
    )
    return transformers.XLNetModel(config)


def bloom(layers: int) -> PreTrainedModel:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=768, n_head=12, n_layer=layers, use_cache=False
    )
    return transformers.BloomModel(config)


def sam(layers: int) -> PreTrainedModel:
    """The image encoder, all layers over the whole image."""
    config = transformers.SamVisionConfig(
        num_hidden_layers=layers,
        global_attn_indexes=list(range(layers)),
        initializer_range=0.02,  # 1e-10 by default, whose outputs are all the same
    )
    return transformers.SamVisionModel(config)


def vitdet(layers: int) -> PreTrainedModel:
    config = transformers.VitDetConfig(
        num_hidden_layers=layers, image_size=1024, use_relative_position_embeddings=True
    )
    return transformers.VitDetModel(config)


def swin(layers: int, kind: str = "Swin") -> PreTrainedModel:
    """The first three stages, each with twice as many layers, every second of them shifted."""
    config = getattr(transformers, f"{kind}Config")(
        image_size=256,
        embed_dim=128,
        depths=[2 * layers] * 3,
        num_heads=[4, 8, 16],
        window_size=16,
        drop_path_rate=0.0,
    )
    model: PreTrainedModel = getattr(transformers, f"{kind}Model")(config)
    return model


def swinv2(layers: int) -> PreTrainedModel:
    return swin(layers, "Swinv2")


def image(side: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, side, side)}


def beit(layers: int, side: int = 512) -> PreTrainedModel:
    """With a table of biases, drawn as its values after training might be."""
    config = transformers.BeitConfig(
        num_hidden_layers=layers,
        image_size=side,
        use_relative_position_bias=True,
        drop_path_rate=0.0,
    )
    model = transformers.BeitModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            torch.nn.init.normal_(parameter)
    return model


def bert(layers: int) -> PreTrainedModel:
    return transformers.BertModel(
        transformers.BertConfig(**BASE, num_hidden_layers=layers, max_position_embeddings=8192)
    )


def modernbert(layers: int) -> PreTrainedModel:
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 0),
    )
    return transformers.ModernBertModel(config)


def llama(layers: int) -> PreTrainedModel:
    config = transformers.LlamaConfig(
        **BASE | {"intermediate_size": 2048},
        num_hidden_layers=layers,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaModel(config)


class InklingLayers(InklingPreTrainedModel):
    """Inkling's attention modules one after the other, without what is between them."""

    def __init__(self, config: transformers.InklingTextConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.layers = torch.nn.ModuleList(InklingAttention(config, layer) for layer in layers)
        self.post_init()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            made = create_sliding_window_causal_mask if layer.is_sliding else create_causal_mask
            mask = made(layer.config, hidden_states, None, past_key_values=None)
            hidden_states = layer(hidden_states, mask)[0]
        return (hidden_states,)


def inkling(layers: int, kind: str = "hybrid") -> PreTrainedModel:
    config = transformers.InklingTextConfig(
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        swa_num_attention_heads=12,
        swa_num_key_value_heads=4,
        swa_head_dim=64,
        log_scaling_n_floor=1024,
        num_hidden_layers=layers,
        layer_types=[kind] * layers,
        attn_implementation="sdpa",
    )
    return InklingLayers(config)


def inkling_sliding(layers: int) -> PreTrainedModel:
    return inkling(layers, "hybrid_sliding")


def states(length: int) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(1, length, 768)}


def wav2vec2_bert(layers: int) -> PreTrainedModel:
    return transformers.Wav2Vec2BertModel(
        transformers.Wav2Vec2BertConfig(num_hidden_layers=layers, layerdrop=0.0)
    )


def frames(length: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(1, length, 160)}


MODELS: dict[str, Model] = {
    "deberta_v2": Model(deberta, text),
    "mpnet": Model(mpnet, text),
    "t5": Model(t5, text),
    "t5_scoring": Model(t5_scoring, scored),
    "xlnet": Model(xlnet, text),
    "funnel": Model(funnel, text),
    "bloom": Model(bloom, text),
    "inkling": Model(inkling, states),
    "inkling_sliding": Model(inkling_sliding, states),
    "sam": Model(sam, image),
    "vitdet": Model(vitdet, image),
    "beit": Model(beit, image),
    "bert": Model(bert, text),
    "modernbert": Model(modernbert, text),
    "llama": Model(llama, text),
    "swin": Model(swin, image),
    "swinv2": Model(swinv2, image),
    "wav2vec2_bert": Model(wav2vec2_bert, frames),
}
