"""Bloom."""

from __future__ import annotations

from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, split_by_head
from posenc.models import Decoder, DecoderConfig

LAYER = "transformer.h.{layer}"

TABLE: Table = {
    "embedding.weight": "transformer.word_embeddings.weight",
    "embedding_norm.{kind}": "transformer.word_embeddings_layernorm.{kind}",
    "blocks.{layer}.attention_norm.{kind}": LAYER + ".input_layernorm.{kind}",
    "blocks.{layer}.attention.merged.{kind}": split_by_head(
        LAYER + ".self_attention.query_key_value.{kind}"
    ),
    "blocks.{layer}.attention.output.{kind}": LAYER + ".self_attention.dense.{kind}",
    "blocks.{layer}.feed_forward_norm.{kind}": LAYER + ".post_attention_layernorm.{kind}",
    "blocks.{layer}.feed_forward.input.{kind}": LAYER + ".mlp.dense_h_to_4h.{kind}",
    "blocks.{layer}.feed_forward.output.{kind}": LAYER + ".mlp.dense_4h_to_h.{kind}",
    "norm.{kind}": "transformer.ln_f.{kind}",
    "output.weight": "lm_head.weight",
}


def make(fields: Fields) -> Decoder:
    """The decoder of a configuration."""
    fields.require("apply_residual_connection_post_layernorm", False)
    config = DecoderConfig(
        vocabulary=fields.count("vocab_size"),
        dim=fields.count("n_embed" if "n_embed" in fields.values else "hidden_size"),
        layers=fields.count("num_hidden_layers" if "n_layer" not in fields.values else "n_layer"),
        heads=fields.count("num_attention_heads" if "n_head" not in fields.values else "n_head"),
        activation="gelu_tanh",
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        bias=True,
        merged=True,
        tied=fields.flag("tie_word_embeddings", True),
        embedding_scale=1.0,
        embedding_norm=True,
        encoding="alibi",
    )
    return Decoder(config)


ENTRY = Family(make=make, table=TABLE, prefix="transformer.", ignored=("lm_head.weight",))
