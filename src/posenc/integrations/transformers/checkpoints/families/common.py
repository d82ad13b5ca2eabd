"""Fields, rules and checks that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from posenc.encoding import Encoding, Part
from posenc.errors import ArgumentError
from posenc.integrations.transformers.checkpoints.family import require_config
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table
from posenc.models import Encoder, EncoderConfig, MaskedLM
from posenc.models.block import Activation
from posenc.models.stack import StackConfig

BLOCK_SIZES = {
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
SIZES = {"vocabulary": "vocab_size", **BLOCK_SIZES}
"""Sizes of a ``StackConfig`` by their usual names in ``config.json``."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_shape(
    fields: Fields,
    *,
    eps: float,
    sizes: Mapping[str, str] = SIZES,
    activations: dict[str, Activation] = ACTIVATIONS,
) -> dict[str, Any]:
    """Sizes, activation and norm of a configuration, with the default ``eps``."""
    return {
        **{ours: fields.count(theirs) for ours, theirs in sizes.items()},
        "activation": fields.choice("hidden_act", activations, "gelu"),
        "norm_eps": fields.number("layer_norm_eps", eps),
    }


def write_shape(
    config: StackConfig,
    *,
    sizes: Mapping[str, str] = SIZES,
    activations: dict[str, Activation] = ACTIVATIONS,
) -> dict[str, Any]:
    """The fields of ``read_shape`` for a model's configuration.

    Raises:
        ArgumentError: if the activation has no name in the family, or heads are grouped.
    """
    names = {ours: theirs for theirs, ours in reversed(activations.items())}
    if config.activation not in names or config.kv_heads not in (None, config.heads):
        require_config(config, activation="gelu", kv_heads=None)
    return {
        **{theirs: getattr(config, ours) for ours, theirs in sizes.items()},
        "intermediate_size": config.feed_forward_width,
        "hidden_act": names[config.activation],
        "layer_norm_eps": 1e-5 if config.norm_eps is None else config.norm_eps,
    }


def wrong_model(model: nn.Module, expected: str) -> ArgumentError:
    """The error for a model of another class."""
    return ArgumentError(
        "model", expected=expected, got=type(model).__name__, remedy="Use another family."
    )


def require_part_alone(encodings: Sequence[Encoding], kind: type[Part], name: str) -> None:
    """Require that every layer is encoded by this part only.

    Raises:
        ArgumentError: for other parts.
    """
    for encoding in encodings:
        if [type(part) for part in encoding.parts()] != [kind]:
            raise ArgumentError(
                "model",
                expected=f"a model encoded by {name} only",
                got=" and ".join(type(part).__name__ for part in encoding.parts()) or "none",
                remedy="Save it by model.save(folder), which supports every encoding.",
            )


def encoder_table(prefix: str) -> Table:
    """Rules of an encoder like BERT whose names start with ``prefix``."""
    layer, embeddings = prefix + "encoder.layer.{layer}", prefix + "embeddings."
    return {
        "embedding.weight": embeddings + "word_embeddings.weight",
        "types.weight": embeddings + "token_type_embeddings.weight",
        "norm.{kind}": embeddings + "LayerNorm.{kind}",
        "blocks.0.attention.encoding.embedding.table": embeddings + "position_embeddings.weight",
        "blocks.{layer}.attention.{input}.{kind}": layer + ".attention.self.{input}.{kind}",
        "blocks.{layer}.attention.output.{kind}": layer + ".attention.output.dense.{kind}",
        "blocks.{layer}.attention_norm.{kind}": layer + ".attention.output.LayerNorm.{kind}",
        "blocks.{layer}.feed_forward.input.{kind}": layer + ".intermediate.dense.{kind}",
        "blocks.{layer}.feed_forward.output.{kind}": layer + ".output.dense.{kind}",
        "blocks.{layer}.feed_forward_norm.{kind}": layer + ".output.LayerNorm.{kind}",
    }


TRANSFORM: Table = {
    "head.dense.{kind}": "cls.predictions.transform.dense.{kind}",
    "head.norm.{kind}": "cls.predictions.transform.LayerNorm.{kind}",
    "head.bias": "cls.predictions.bias",
}
"""Rules of BERT's masked-LM head."""


def with_head(encoder: Table, head: Table) -> Table:
    """Rules of an ``Encoder``, and of a model with the encoder and a head."""
    inside = {f"encoder.{ours}": theirs for ours, theirs in encoder.items()}
    return {**encoder, **inside, **head}


def absolute_encoder(
    fields: Fields, head: str, length: Callable[[int], int] = lambda rows: rows
) -> Encoder | MaskedLM:
    """An encoder like BERT, with a masked-LM head if the checkpoint has tensors of it.

    Args:
        fields: the configuration.
        head: prefix of the head's tensors.
        length: maximum length by ``max_position_embeddings``.
    """
    fields.require("is_decoder", False)
    fields.require("position_embedding_type", "absolute")
    config = EncoderConfig(
        **read_shape(fields, eps=1e-12),
        types=fields.count("type_vocab_size", 2),
        embedding_scale=1.0,
        encoding="learned",
        max_length=length(fields.count("max_position_embeddings", 512)),
    )
    return masked_if_headed(config, fields, head)


def masked_if_headed(config: EncoderConfig, fields: Fields, *heads: str) -> Encoder | MaskedLM:
    """A ``MaskedLM`` if the checkpoint has tensors of a head, else an ``Encoder``."""
    masked = any(name.startswith(heads) for name in fields.tensors)
    return MaskedLM(config) if masked else Encoder(config)
