"""BERT: encoder, with or without the masked-LM head."""

from __future__ import annotations

from torch import nn

from posenc.encodings.embedding.learned import Learned
from posenc.integrations.transformers.checkpoints.families import common
from posenc.integrations.transformers.checkpoints.family import Family, Written, require_config
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.models import Encoder, MaskedLM
from posenc.models.checkpoint import stored_tensors
from posenc.models.replacing import encodings_of

OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of a norm's weight and bias in old checkpoints."""


def make(fields: Fields) -> Encoder | MaskedLM:
    """The encoder of a configuration, with a head if the checkpoint has one."""
    model = common.absolute_encoder(fields, "cls.predictions.")
    if isinstance(model, MaskedLM):
        fields.require("hidden_act", "gelu")
    return model


def write(model: nn.Module, like: Fields) -> Written:
    """Configuration and tensors of an encoder shaped like BERT."""
    if not isinstance(model, Encoder | MaskedLM):
        raise common.wrong_model(model, "an Encoder or a MaskedLM")
    config = model.config
    require_config(
        config,
        encoding="learned",
        norm="layer",
        norm_first=False,
        bias=True,
        biases="all",
        merged=False,
        embedding_factor=1.0,
        scale=None,
    )
    if config.types < 1:
        require_config(config, types=2)
    encodings = encodings_of(model)
    common.require_part_alone(encodings, Learned, "learned")
    table = encodings[0].embedding
    assert isinstance(table, Learned)
    fields = common.write_shape(config) | {
        "type_vocab_size": config.types,
        "max_position_embeddings": table.max_length,
    }
    architecture = "BertForMaskedLM" if isinstance(model, MaskedLM) else "BertModel"
    return Written(fields, stored_tensors(model), architecture)


ENTRY = Family(
    make=make,
    table=common.with_head(common.encoder_table("bert."), common.TRANSFORM),
    prefix="bert.",
    aliases=OLD_ENDINGS,
    ignored=(
        "bert.embeddings.position_ids",
        "bert.pooler.dense.{kind}",
        "cls.predictions.decoder.{kind}",
        "cls.seq_relationship.{kind}",
    ),
    write=write,
)
