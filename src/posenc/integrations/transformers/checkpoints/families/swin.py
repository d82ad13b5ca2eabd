"""Swin: encoder, with or without the classifier."""

from __future__ import annotations

from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, transposed
from posenc.models import Swin, SwinConfig

THEIRS = "swin.encoder.layers.{layer}.blocks.{block}"
OURS = "stages.{layer}.blocks.{block}"
MERGING = "swin.encoder.layers.{layer}.downsample"

TABLE: Table = {
    "patches.projection.{kind}": "swin.embeddings.patch_embeddings.projection.{kind}",
    "patch_norm.{kind}": "swin.embeddings.norm.{kind}",
    OURS + ".attention.encoding.score.table": transposed(
        THEIRS + ".attention.self.relative_position_bias_table"
    ),
    OURS + ".attention_norm.{kind}": THEIRS + ".layernorm_before.{kind}",
    OURS + ".attention.{input}.{kind}": THEIRS + ".attention.self.{input}.{kind}",
    OURS + ".attention.output.{kind}": THEIRS + ".attention.output.dense.{kind}",
    OURS + ".feed_forward_norm.{kind}": THEIRS + ".layernorm_after.{kind}",
    OURS + ".feed_forward.input.{kind}": THEIRS + ".intermediate.dense.{kind}",
    OURS + ".feed_forward.output.{kind}": THEIRS + ".output.dense.{kind}",
    "merging.{layer}.norm.{kind}": MERGING + ".norm.{kind}",
    "merging.{layer}.projection.{kind}": MERGING + ".reduction.{kind}",
    "norm.{kind}": "swin.layernorm.{kind}",
    "head.{kind}": "classifier.{kind}",
}


def make(fields: Fields) -> Swin:
    """The encoder of a configuration, with a classifier if the checkpoint has one."""
    fields.require("hidden_act", "gelu")
    fields.require("layer_norm_eps", 1e-5)
    fields.require("mlp_ratio", 4.0)
    fields.require("qkv_bias", True)
    fields.require("use_absolute_embeddings", False)
    config = SwinConfig(
        size=fields.sides("image_size", 224),
        patch=fields.square("patch_size", 4),
        channels=fields.count("num_channels", 3),
        dim=fields.count("embed_dim", 96),
        depths=fields.counts("depths"),
        heads=fields.counts("num_heads"),
        window=fields.count("window_size", 7),
        encoding="swin",
        classes=fields.classes() if "classifier.weight" in fields.tensors else None,
    )
    return Swin(config)


ENTRY = Family(
    make=make,
    table=TABLE,
    prefix="swin.",
    ignored=(THEIRS + ".attention.self.relative_position_index",),
)
