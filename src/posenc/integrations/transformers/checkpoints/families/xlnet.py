"""XLNet's encoder: its content stream, with all tokens in view."""

from __future__ import annotations

from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import (
    Table,
    head_columns,
    head_rows,
    heads_first,
)
from posenc.models import Encoder, EncoderConfig
from posenc.models.block import Activation

LAYER = "transformer.layer.{layer}"
BLOCK = "blocks.{layer}"

TABLE: Table = {
    "embedding.weight": "transformer.word_embedding.weight",
    BLOCK + ".attention.query.weight": head_columns(LAYER + ".rel_attn.q"),
    BLOCK + ".attention.key.weight": head_columns(LAYER + ".rel_attn.k"),
    BLOCK + ".attention.value.weight": head_columns(LAYER + ".rel_attn.v"),
    BLOCK + ".attention.output.weight": head_rows(LAYER + ".rel_attn.o"),
    BLOCK + ".attention.encoding.score.weight": heads_first(LAYER + ".rel_attn.r"),
    BLOCK + ".attention.encoding.score.biases.content": LAYER + ".rel_attn.r_w_bias",
    BLOCK + ".attention.encoding.score.biases.position": LAYER + ".rel_attn.r_r_bias",
    BLOCK + ".attention_norm.{kind}": LAYER + ".rel_attn.layer_norm.{kind}",
    BLOCK + ".feed_forward.input.{kind}": LAYER + ".ff.layer_1.{kind}",
    BLOCK + ".feed_forward.output.{kind}": LAYER + ".ff.layer_2.{kind}",
    BLOCK + ".feed_forward_norm.{kind}": LAYER + ".ff.layer_norm.{kind}",
}

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}


def make(fields: Fields) -> Encoder:
    """The encoder of a configuration."""
    fields.require("attn_type", "bi")
    fields.require("bi_data", False)
    fields.require("clamp_len", -1)
    fields.require("same_length", False)
    config = EncoderConfig(
        vocabulary=fields.count("vocab_size"),
        dim=fields.count("d_model"),
        layers=fields.count("n_layer"),
        heads=fields.count("n_head"),
        hidden=fields.count("d_inner"),
        activation=fields.choice("ff_activation", ACTIVATIONS, "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        attention_bias="none",
        embedding_scale=1.0,
        embedding_norm=False,
        encoding="xlnet",
    )
    return Encoder(config)


ENTRY = Family(
    make=make,
    table=TABLE,
    prefix="transformer.",
    # What the second stream and the relative segments need, of which the encoder has none, and
    # the head that reads the second stream.
    ignored=(
        "transformer.mask_emb",
        LAYER + ".rel_attn.r_s_bias",
        LAYER + ".rel_attn.seg_embed",
        "lm_loss.{kind}",
    ),
)
