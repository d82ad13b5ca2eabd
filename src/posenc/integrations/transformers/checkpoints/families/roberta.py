"""RoBERTa: BERT with positions from 2 and another head."""

from __future__ import annotations

from posenc.integrations.transformers.checkpoints.families import common
from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, rows_from
from posenc.models import Encoder, MaskedLM

FIRST = 2
"""Row of the first position: one past the padding id 1."""

ENCODER: Table = {
    **common.encoder_table("roberta."),
    "blocks.0.attention.encoding.embedding.table": rows_from(
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
    fields.require("pad_token_id", FIRST - 1)

    def length(rows: int) -> int:
        if rows <= FIRST:
            raise fields.wrong("max_position_embeddings", f"more than {FIRST}", rows)
        return rows - FIRST

    return common.absolute_encoder(fields, "lm_head.", length)


ENTRY = Family(
    make=make,
    table=common.with_head(ENCODER, HEAD),
    prefix="roberta.",
    ignored=(
        "roberta.embeddings.position_ids",
        "roberta.pooler.dense.{kind}",
        "lm_head.decoder.{kind}",
    ),
)
