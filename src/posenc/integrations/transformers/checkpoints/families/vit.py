"""ViT: encoder, with or without the classifier."""

from __future__ import annotations

from torch import nn

from posenc.encodings.embedding.learned2d import Learned2d
from posenc.integrations.transformers.checkpoints.families import common
from posenc.integrations.transformers.checkpoints.family import Family, Written, require_config
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, piece
from posenc.models import ImageConfig, ImageEncoder, VisionTransformer
from posenc.models.checkpoint import stored_tensors
from posenc.models.replacing import encodings_of

LAYER = "vit.encoder.layer.{layer}"
BLOCK = "blocks.{layer}"
POSITIONS = "vit.embeddings.position_embeddings"

ENCODER: Table = {
    "patches.projection.{kind}": "vit.embeddings.patch_embeddings.projection.{kind}",
    "special": piece("vit.embeddings.cls_token"),
    "encoding.embedding.special": piece(POSITIONS),
    "encoding.embedding.table": piece(POSITIONS),
    BLOCK + ".attention_norm.{kind}": LAYER + ".layernorm_before.{kind}",
    BLOCK + ".attention.{input}.{kind}": LAYER + ".attention.attention.{input}.{kind}",
    BLOCK + ".attention.output.{kind}": LAYER + ".attention.output.dense.{kind}",
    BLOCK + ".feed_forward_norm.{kind}": LAYER + ".layernorm_after.{kind}",
    BLOCK + ".feed_forward.input.{kind}": LAYER + ".intermediate.dense.{kind}",
    BLOCK + ".feed_forward.output.{kind}": LAYER + ".output.dense.{kind}",
    "norm.{kind}": "vit.layernorm.{kind}",
}


def make(fields: Fields) -> ImageEncoder | VisionTransformer:
    """The encoder of a configuration, with a classifier if the checkpoint has one."""
    fields.require("qkv_bias", True)
    classified = "classifier.weight" in fields.tensors
    config = ImageConfig(
        **common.read_shape(fields, eps=1e-12, sizes=common.BLOCK_SIZES),
        size=fields.sides("image_size", 224),
        patch=fields.square("patch_size", 16),
        channels=fields.count("num_channels", 3),
        encoding="learned2d",
        classes=fields.classes() if classified else None,
    )
    return VisionTransformer(config) if classified else ImageEncoder(config)


def write(model: nn.Module, like: Fields) -> Written:
    """Configuration and tensors of an encoder shaped like ViT.

    The image size is that of its position table, which may have been resampled.
    """
    if not isinstance(model, ImageEncoder | VisionTransformer):
        raise common.wrong_model(model, "an ImageEncoder or a VisionTransformer")
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
    encoding = encodings_of(model)[0]
    common.require_part_alone([encoding], Learned2d, "learned2d")
    table = encoding.embedding
    assert isinstance(table, Learned2d)
    fields = common.write_shape(config, sizes=common.BLOCK_SIZES) | {
        "image_size": [config.patch * side for side in table.table.shape[:2]],
        "patch_size": config.patch,
        "num_channels": config.channels,
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
    table=common.with_head(ENCODER, {"head.{kind}": "classifier.{kind}"}),
    prefix="vit.",
    ignored=("vit.pooler.dense.{kind}",),
    write=write,
)
