"""DeBERTa versions 2 and 3: encoder, with or without a masked-LM head on its last layer."""

from __future__ import annotations

from typing import Any

from posenc.integrations.transformers.checkpoints.families import common
from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table
from posenc.models import Encoder, EncoderConfig, MaskedLM

LAYER = "deberta.encoder.layer.{layer}.attention.self"
SCORE = "blocks.{layer}.attention.encoding.score"

ENCODER: Table = {
    **common.encoder_table("deberta."),
    "blocks.{layer}.attention.{input}.{kind}": LAYER + ".{input}_proj.{kind}",
    "blocks.0.attention.encoding.score.relative.rows": "deberta.encoder.rel_embeddings.weight",
    "blocks.0.attention.encoding.score.relative.norm.{kind}": "deberta.encoder.LayerNorm.{kind}",
    SCORE + ".query.{kind}": LAYER + ".pos_query_proj.{kind}",
    SCORE + ".key.weight": LAYER + ".pos_key_proj.weight",
}

RELATIVE_NORM_EPS = 1e-7


def make(fields: Fields) -> Encoder | MaskedLM:
    """The encoder of a configuration, with a head if the checkpoint has one.

    Without the Enhanced Mask Decoder, which transformers lacks.
    """
    fields.require("conv_kernel_size", 0)
    shape = common.read_shape(fields, eps=1e-7)
    fields.require("embedding_size", shape["dim"])
    names = []
    options: dict[str, Any] = {}
    if fields.flag("relative_attention", False):
        names, options = ["deberta"], _options(fields)
    elif fields.values.get("pos_att_type"):
        raise fields.wrong("pos_att_type", "none without relative_attention", "some")
    if fields.flag("position_biased_input", True):
        names.append("learned")
    config = EncoderConfig(
        **shape,
        types=fields.count("type_vocab_size") if fields.get("type_vocab_size", 0) else 0,
        embedding_scale=1.0,
        encoding="+".join(names) or "nope",
        options=options,
        max_length=fields.count("max_position_embeddings", 512),
    )
    model = common.masked_if_headed(config, fields, "cls.predictions.", "lm_predictions.")
    if isinstance(model, MaskedLM):
        fields.require("hidden_act", "gelu")
    return model


def _options(fields: Fields) -> dict[str, Any]:
    """Options of ``deberta``; -1 means "none" in this family's configurations."""
    kinds = fields.get("pos_att_type", None) or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or set(kinds) != {"c2p", "p2c"}:
        raise fields.wrong("pos_att_type", "c2p and p2c", kinds)
    distance = fields.get("max_relative_positions", -1)
    if distance in (-1, 0):
        distance = fields.count("max_position_embeddings", 512)
    buckets = fields.get("position_buckets", -1)
    normalize = "layer_norm" in str(fields.get("norm_rel_ebd", "none"))
    if normalize and fields.number("layer_norm_eps", 1e-7) != RELATIVE_NORM_EPS:
        raise fields.wrong("layer_norm_eps", f"{RELATIVE_NORM_EPS}", fields.get("layer_norm_eps"))
    return {
        "max_distance": distance,
        "buckets": None if buckets in (-1, 0) else buckets,
        "projections": "content" if fields.flag("share_att_key", False) else "own",
        "normalize": normalize,
        "lookup": "released",
        "clamp": "after",
    }


ENTRY = Family(
    make=make,
    table=common.with_head(ENCODER, common.TRANSFORM),
    prefix="deberta.",
    aliases={
        **{
            f"cls.predictions.transform.{name}": f"lm_predictions.lm_head.{name}"
            for name in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias")
        },
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    },
    ignored=(
        "deberta.embeddings.position_ids",
        "cls.predictions.decoder.{kind}",
        # constant over the keys of a query: cancelled by the softmax
        LAYER + ".pos_key_proj.bias",
    ),
)
