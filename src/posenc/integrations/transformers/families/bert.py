"""BERT: encoder, with or without the masked-LM head."""

from __future__ import annotations

from typing import Any

from torch import nn

from posenc.encodings.embedding.learned import Learned
from posenc.errors import ArgumentError
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.family import (
    Family,
    Written,
    require_config,
    stored_tensors,
)
from posenc.integrations.transformers.mapping import Table
from posenc.models import Encoder, EncoderConfig, MaskedLM
from posenc.models.block import Activation
from posenc.models.replacing import encodings_of

__all__ = ["ACTIVATIONS", "ENTRY", "SIZES", "encoder_table", "with_head"]

SIZES = {
    "vocabulary": "vocab_size",
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of a norm's weight and bias in old checkpoints."""


def encoder_table(prefix: str) -> Table:
    """Rules of an encoder whose names in transformers start with ``prefix``."""
    layer = prefix + "encoder.layer.{layer}"
    return {
        "embedding.weight": prefix + "embeddings.word_embeddings.weight",
        "types.weight": prefix + "embeddings.token_type_embeddings.weight",
        "norm.{kind}": prefix + "embeddings.LayerNorm.{kind}",
        "blocks.0.attention.encoding.embedding.table": prefix
        + "embeddings.position_embeddings.weight",
        "blocks.{layer}.attention.query.{kind}": layer + ".attention.self.query.{kind}",
        "blocks.{layer}.attention.key.{kind}": layer + ".attention.self.key.{kind}",
        "blocks.{layer}.attention.value.{kind}": layer + ".attention.self.value.{kind}",
        "blocks.{layer}.attention.output.{kind}": layer + ".attention.output.dense.{kind}",
        "blocks.{layer}.attention_norm.{kind}": layer + ".attention.output.LayerNorm.{kind}",
        "blocks.{layer}.feed_forward.input.{kind}": layer + ".intermediate.dense.{kind}",
        "blocks.{layer}.feed_forward.output.{kind}": layer + ".output.dense.{kind}",
        "blocks.{layer}.feed_forward_norm.{kind}": layer + ".output.LayerNorm.{kind}",
    }


def with_head(encoder: Table, head: Table) -> Table:
    """Rules of an ``Encoder``, and of a ``MaskedLM`` with it."""
    inside = {f"encoder.{ours}": theirs for ours, theirs in encoder.items()}
    return {**encoder, **inside, **head}


HEAD: Table = {
    "head.dense.{kind}": "cls.predictions.transform.dense.{kind}",
    "head.norm.{kind}": "cls.predictions.transform.LayerNorm.{kind}",
    "head.bias": "cls.predictions.bias",
}


def make(fields: Fields) -> Encoder | MaskedLM:
    """The encoder of a configuration, with a head if the checkpoint has one."""
    fields.require("is_decoder", False)
    fields.require("position_embedding_type", "absolute")
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    config = EncoderConfig(
        **sizes,
        types=fields.count("type_vocab_size", 2),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        embedding_scale=1.0,
        encoding="learned",
        max_length=fields.count("max_position_embeddings", 512),
    )
    if not any(name.startswith("cls.predictions.") for name in fields.tensors):
        return Encoder(config)
    fields.require("hidden_act", "gelu")
    return MaskedLM(config)


def write(model: nn.Module, like: Fields) -> Written:
    """Configuration and tensors of an encoder shaped like BERT."""
    if not isinstance(model, Encoder | MaskedLM):
        raise ArgumentError(
            "model",
            expected="an Encoder or a MaskedLM",
            got=type(model).__name__,
            remedy="Use another family.",
        )
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
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in activations or config.types < 1:
        require_config(config, activation="gelu", types=2)
    encoder = model.encoder if isinstance(model, MaskedLM) else model
    for encoding in encodings_of(model):
        if not isinstance(encoding.embedding, Learned) or len(encoding.parts()) > 1:
            raise ArgumentError(
                "model",
                expected="a model encoded by learned only",
                got=" and ".join(type(part).__name__ for part in encoding.parts()) or "none",
                remedy="Save it by model.save(folder), which supports every encoding.",
            )
    first = encoder.blocks.get_submodule("0.attention.encoding.embedding")
    fields = {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": config.feed_forward_width,
        "type_vocab_size": config.types,
        "hidden_act": activations[config.activation],
        "layer_norm_eps": 1e-5 if config.norm_eps is None else config.norm_eps,
        "max_position_embeddings": first.get_parameter("table").shape[0],
    }
    architecture = "BertForMaskedLM" if isinstance(model, MaskedLM) else "BertModel"
    return Written(fields, stored_tensors(model), architecture)


ENTRY = Family(
    make=make,
    table=with_head(encoder_table("bert."), HEAD),
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
