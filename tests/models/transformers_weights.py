"""Weights of transformers' models in those of posenc."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posenc.models.checkpoint import stored_tensors

Model = TypeVar("Model", bound=nn.Module)

LLAMA = {
    "embedding": "embed_tokens",
    "blocks": "layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.input": "mlp.{gate,up}_proj",
    "feed_forward.output": "mlp.down_proj",
    "output": "lm_head",
}
GPT_NEOX = {
    "embedding": "embed_in",
    "blocks": "layers",
    "attention_norm": "input_layernorm",
    "merged": "query_key_value",
    "attention.output": "attention.dense",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.input": "mlp.dense_h_to_4h",
    "feed_forward.output": "mlp.dense_4h_to_h",
    "norm": "final_layer_norm",
    "output": "embed_out",
}
BLOOM = GPT_NEOX | {
    "embedding": "word_embeddings",
    "embedding_norm": "word_embeddings_layernorm",
    "blocks": "h",
    "attention": "self_attention",
    "attention.output": "self_attention.dense",
    "norm": "ln_f",
}
BERT = {
    "encoder": "",  # of a model with a head
    "embedding": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "blocks.0.attention.encoding.embedding.table": "embeddings.position_embeddings.weight",
    "blocks": "encoder.layer",
    "attention": "attention.self",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
}
ROBERTA = BERT | {"head": "lm_head", "head.norm": "lm_head.layer_norm"}
ROBERTA |= {"head.dense": "lm_head.dense", "head.bias": "lm_head.bias"}
DEBERTA = BERT | {
    "query": "query_proj",
    "key": "key_proj",
    "value": "value_proj",
    "blocks.0.attention.encoding.score.relative.rows": "encoder.rel_embeddings.weight",
    "blocks.0.attention.encoding.score.relative.norm": "encoder.LayerNorm",
    "encoding.score.query": "pos_query_proj",
    "encoding.score.key": "pos_key_proj",
}
XLNET = {
    "embedding": "word_embedding",
    "blocks": "layer",
    "attention": "rel_attn",
    "query.weight": "q",
    "key.weight": "k",
    "value.weight": "v",
    "attention.output.weight": "rel_attn.o",
    "encoding.score.weight": "r",
    "encoding.score.biases.content": "r_w_bias",
    "encoding.score.biases.position": "r_r_bias",
    "attention_norm": "rel_attn.layer_norm",
    "feed_forward": "ff",
    "input": "layer_1",
    "output": "layer_2",
    "feed_forward_norm": "ff.layer_norm",
}


def _t5_side(ours: str, theirs: str, norm: str) -> dict[str, str]:
    """Names of a side, whose last sub-layer is the feed-forward one."""
    last = {"encoder": 1, "decoder": 2}[theirs]
    names = {ours: f"{theirs}.block", norm: f"{theirs}.final_layer_norm"}
    for layer in range(3):
        block = f"{theirs}.block.{layer}.layer.{last}"
        for side, weights in (("input", "wi"), ("output", "wo")):
            names[f"{ours}.{layer}.feed_forward.{side}"] = f"{block}.DenseReluDense.{weights}"
        names[f"{ours}.{layer}.feed_forward_norm"] = f"{block}.layer_norm"
    return names


T5 = {
    "source_embedding": "shared",
    "embedding": "shared",
    **_t5_side("encoder", "encoder", "encoder_norm"),
    **_t5_side("decoder", "decoder", "decoder_norm"),
    **_t5_side("blocks", "encoder", "norm"),
    "attention_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "cross_norm": "layer.1.layer_norm",
    "cross": "layer.1.EncDecAttention",
    "query": "q",
    "key": "k",
    "value": "v",
    "attention.output": "layer.0.SelfAttention.o",
    "cross.output": "layer.1.EncDecAttention.o",
    "encoding.score.table": "relative_attention_bias.weight",
    "output": "lm_head",
}
VIT = {
    "encoder": "",
    "patches": "embeddings.patch_embeddings",
    "special": "embeddings.cls_token",
    "blocks.0.attention.encoding.embedding.special": "embeddings.position_embeddings",
    "blocks.0.attention.encoding.embedding.table": "embeddings.position_embeddings",
    "blocks": "encoder.layer",
    "attention_norm": "layernorm_before",
    "attention": "attention.attention",
    "attention.output": "attention.output.dense",
    "feed_forward_norm": "layernorm_after",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "norm": "layernorm",
    "head": "classifier",
}
SWIN = {name: theirs for name, theirs in VIT.items() if name not in ("encoder", "blocks")} | {
    "stages": "encoder.layers",
    "attention": "attention.self",
    "patch_norm": "embeddings.norm",
    "attention.encoding.score.table": "attention.self.relative_position_bias_table",
    "merging.0.norm": "encoder.layers.0.downsample.norm",
    "merging.0.projection": "encoder.layers.0.downsample.reduction",
}
TABLES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), LLAMA),
    "gpt_neox": GPT_NEOX,
    "bloom": BLOOM,
    "bert": BERT,
    "roberta": ROBERTA,
    "deberta-v2": DEBERTA,
    "xlnet": XLNET,
    "t5": T5,
    "vit": VIT,
    "swin": SWIN,
}
"""Parts of posenc's names in those of a ``model_type``; braces hold several to concatenate."""


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Rows of all queries, keys and values, of those of each head in turn."""
    return x.reshape(heads, 3, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


Conversion = Callable[[Tensor, int], Tensor]

CONVERSIONS: dict[str, dict[str, Conversion]] = {
    "gpt_neox": {r"merged": _by_head},
    "bloom": {r"merged": _by_head},
    "roberta": {r"encoding\.embedding": lambda x, _: x[2:]},
    "xlnet": {
        r"query|key|value": lambda x, _: x.flatten(1).mT,
        r"score\.weight": lambda x, _: x.permute(1, 2, 0),
    },
    "t5": {r"score\.table": lambda x, _: x.mT},
    "vit": {
        r"embedding\.special": lambda x, _: x[:, :1],
        r"embedding\.table": lambda x, _: x[:, 1:],
    },
    "swin": {r"score\.table": lambda x, _: x.mT},
}
"""Conversions of tensors, with the number of heads, by ``model_type`` and posenc's names."""


@torch.no_grad()
def copy_weights(theirs: Any, ours: Model, names: Mapping[str, str] | None = None) -> Model:
    """The model of posenc, in eval mode, with the weights of one of transformers.

    Args:
        theirs: the model of transformers.
        ours: of the same shape.
        names: over those of ``TABLES``.
    """
    kind = theirs.config.model_type
    table = TABLES[kind] | dict(names or {})
    parts = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
    with TemporaryDirectory() as folder:  # names in checkpoints are those of every version
        theirs.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    prefix = f"{theirs.base_model_prefix}."
    stored = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    for name, tensor in stored_tensors(ours).items():
        spelled = re.sub(rf"(?<![^.])({parts})(?![^.])", lambda part: table[part[0]], name)
        if getattr(theirs.config, "is_gated_act", False):  # of T5
            spelled = spelled.replace(".wi.", ".wi_{0,1}.")
        before, *several = re.split(r"[{}]", spelled.lstrip("."))
        spellings = [f"{before}{x}{several[1]}" for x in several[0].split(",")] if several else []
        value = torch.cat([stored[spelling] for spelling in spellings or [before]])
        for pattern, convert in CONVERSIONS.get(kind, {}).items():
            if re.search(pattern, name):
                value = convert(value, ours.config.heads)
        tensor.copy_(value.reshape(tensor.shape))
    return ours.eval()
