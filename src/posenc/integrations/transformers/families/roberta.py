"""RoBERTa: BERT with positions from 2 and another head."""

from __future__ import annotations

from typing import Any

from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.families.bert import (
    ACTIVATIONS,
    SIZES,
    encoder_table,
    with_head,
)
from posenc.integrations.transformers.family import Family
from posenc.integrations.transformers.mapping import RowsFrom, Table
from posenc.models import Encoder, EncoderConfig, MaskedLM

__all__ = ["ENTRY"]

FIRST = 2
"""Row of the first position: one past the padding id 1."""

ENCODER: Table = {
    **encoder_table("roberta."),
    "blocks.0.attention.encoding.embedding.table": RowsFrom(
        "roberta.embeddings.position_embeddings.weight", FIRST
    ),
}

HEAD: Table = {
    "head.dense.{kind}": "lm_head.dense.{kind}",
    "head.norm.{kind}": "lm_head.layer_norm.{kind}",
    "head.bias": "lm_head.bias",
}


def make(fields: Fields) -> Encoder | MaskedLM:
    """The encoder of a configuration, with a head if the checkpoint has one."""
    fields.require("is_decoder", False)
    fields.require("position_embedding_type", "absolute")
    fields.require("pad_token_id", FIRST - 1)
    length = fields.count("max_position_embeddings", 512)
    if length <= FIRST:
        raise fields.wrong("max_position_embeddings", f"more than {FIRST}", length)
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    config = EncoderConfig(
        **sizes,
        types=fields.count("type_vocab_size", 2),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        embedding_scale=1.0,
        encoding="learned",
        max_length=length - FIRST,
    )
    masked = any(name.startswith("lm_head.") for name in fields.tensors)
    return MaskedLM(config) if masked else Encoder(config)


ENTRY = Family(
    make=make,
    table=with_head(ENCODER, HEAD),
    prefix="roberta.",
    ignored=(
        "roberta.embeddings.position_ids",
        "roberta.pooler.dense.{kind}",
        "lm_head.decoder.{kind}",
    ),
)
