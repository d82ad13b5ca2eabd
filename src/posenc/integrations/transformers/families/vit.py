"""ViT: encoder, with or without the classifier."""

from __future__ import annotations

from typing import Any

from torch import nn

from posenc.encodings.embedding.learned2d import Learned2d
from posenc.errors import ArgumentError
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.family import (
    Family,
    Written,
    require_config,
    stored_tensors,
)
from posenc.integrations.transformers.mapping import Piece, Table
from posenc.models import ImageConfig, ImageEncoder, VisionTransformer
from posenc.models.block import Activation

__all__ = ["ENTRY"]

LAYER = "vit.encoder.layer.{layer}"
BLOCK = "blocks.{layer}"
POSITIONS = "vit.embeddings.position_embeddings"

ENCODER: Table = {
    "patches.projection.{kind}": "vit.embeddings.patch_embeddings.projection.{kind}",
    "special": Piece("vit.embeddings.cls_token"),
    "encoding.embedding.special": Piece(POSITIONS),
    "encoding.embedding.table": Piece(POSITIONS),
    BLOCK + ".attention_norm.{kind}": LAYER + ".layernorm_before.{kind}",
    BLOCK + ".attention.query.{kind}": LAYER + ".attention.attention.query.{kind}",
    BLOCK + ".attention.key.{kind}": LAYER + ".attention.attention.key.{kind}",
    BLOCK + ".attention.value.{kind}": LAYER + ".attention.attention.value.{kind}",
    BLOCK + ".attention.output.{kind}": LAYER + ".attention.output.dense.{kind}",
    BLOCK + ".feed_forward_norm.{kind}": LAYER + ".layernorm_after.{kind}",
    BLOCK + ".feed_forward.input.{kind}": LAYER + ".intermediate.dense.{kind}",
    BLOCK + ".feed_forward.output.{kind}": LAYER + ".output.dense.{kind}",
    "norm.{kind}": "vit.layernorm.{kind}",
}

TABLE: Table = {
    **ENCODER,
    **{f"encoder.{ours}": theirs for ours, theirs in ENCODER.items()},
    "head.{kind}": "classifier.{kind}",
}

SIZES = {
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


def make(fields: Fields) -> ImageEncoder | VisionTransformer:
    """The encoder of a configuration, with a classifier if the checkpoint has one."""
    fields.require("qkv_bias", True)
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    classified = "classifier.weight" in fields.tensors
    config = ImageConfig(
        **sizes,
        size=fields.sides("image_size", 224),
        patch=fields.square("patch_size", 16),
        channels=fields.count("num_channels", 3),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        encoding="learned2d",
        classes=fields.classes() if classified else None,
    )
    return VisionTransformer(config) if classified else ImageEncoder(config)


def write(model: nn.Module, like: Fields) -> Written:
    """Configuration and tensors of an encoder shaped like ViT.

    The image size is that of its position table, which may have been resampled.
    """
    if not isinstance(model, ImageEncoder | VisionTransformer):
        raise ArgumentError(
            "model",
            expected="an ImageEncoder or a VisionTransformer",
            got=type(model).__name__,
            remedy="Use another family.",
        )
    config = model.config
    require_config(
        config,
        norm="layer",
        norm_first=True,
        parallel=False,
        bias=True,
        biases="all",
        merged=False,
        special=1,
        overlap=0,
        positions="input",
        scale=None,
    )
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in activations or config.kv_heads not in (None, config.heads):
        require_config(config, activation="gelu", kv_heads=None)
    encoder = model.encoder if isinstance(model, VisionTransformer) else model
    table = encoder.encoding.embedding
    if not isinstance(table, Learned2d) or len(encoder.encoding.parts()) > 1:
        raise ArgumentError(
            "model",
            expected="a model encoded by learned2d only",
            got=" and ".join(type(part).__name__ for part in encoder.encoding.parts()) or "none",
            remedy="Save it by model.save(folder), which supports every encoding.",
        )
    fields: dict[str, Any] = {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": config.feed_forward_width,
        "image_size": [config.patch * side for side in table.table.shape[:2]],
        "patch_size": config.patch,
        "num_channels": config.channels,
        "hidden_act": activations[config.activation],
        "layer_norm_eps": 1e-5 if config.norm_eps is None else config.norm_eps,
        "qkv_bias": True,
    }
    if isinstance(model, ImageEncoder):
        return Written(fields, stored_tensors(model), "ViTModel")
    labels = like.values.get("id2label")
    if not isinstance(labels, dict) or len(labels) != config.classes:
        names = [f"LABEL_{number}" for number in range(config.classes or 0)]
        fields["id2label"] = {str(number): name for number, name in enumerate(names)}
        fields["label2id"] = {name: number for number, name in enumerate(names)}
    return Written(fields, stored_tensors(model), "ViTForImageClassification")


ENTRY = Family(
    make=make,
    table=TABLE,
    prefix="vit.",
    ignored=("vit.pooler.dense.{kind}",),
    write=write,
)
