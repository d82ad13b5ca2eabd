"""DeBERTa versions 2 and 3: encoder, with or without a masked-LM head on its last layer."""

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
from posenc.integrations.transformers.mapping import Table
from posenc.models import Encoder, EncoderConfig, MaskedLM

__all__ = ["ENTRY"]

LAYER = "deberta.encoder.layer.{layer}.attention.self"
SCORE = "blocks.{layer}.attention.encoding.score"

ENCODER: Table = {
    **encoder_table("deberta."),
    "blocks.{layer}.attention.query.{kind}": LAYER + ".query_proj.{kind}",
    "blocks.{layer}.attention.key.{kind}": LAYER + ".key_proj.{kind}",
    "blocks.{layer}.attention.value.{kind}": LAYER + ".value_proj.{kind}",
    "blocks.0.attention.encoding.score.relative.rows": "deberta.encoder.rel_embeddings.weight",
    "blocks.0.attention.encoding.score.relative.norm.{kind}": "deberta.encoder.LayerNorm.{kind}",
    SCORE + ".query.{kind}": LAYER + ".pos_query_proj.{kind}",
    SCORE + ".key.weight": LAYER + ".pos_key_proj.weight",
}

HEAD: Table = {
    "head.dense.{kind}": "cls.predictions.transform.dense.{kind}",
    "head.norm.{kind}": "cls.predictions.transform.LayerNorm.{kind}",
    "head.bias": "cls.predictions.bias",
}

RELATIVE_NORM_EPS = 1e-7


def make(fields: Fields) -> Encoder | MaskedLM:
    """The encoder of a configuration, with a head if the checkpoint has one.

    Without the Enhanced Mask Decoder, which transformers lacks.
    """
    fields.require("conv_kernel_size", 0)
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    fields.require("embedding_size", sizes["dim"])
    names = []
    options: dict[str, Any] = {}
    if fields.flag("relative_attention", False):
        names, options = ["deberta"], _options(fields)
    elif fields.values.get("pos_att_type"):
        raise fields.wrong("pos_att_type", "none without relative_attention", "some")
    if fields.flag("position_biased_input", True):
        names.append("learned")
    config = EncoderConfig(
        **sizes,
        types=fields.count("type_vocab_size") if fields.get("type_vocab_size", 0) else 0,
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-7),
        embedding_scale=1.0,
        encoding="+".join(names) or "nope",
        options=options,
        max_length=fields.count("max_position_embeddings", 512),
    )
    heads = ("cls.predictions.", "lm_predictions.")
    if not any(name.startswith(heads) for name in fields.tensors):
        return Encoder(config)
    fields.require("hidden_act", "gelu")
    return MaskedLM(config)


def _options(fields: Fields) -> dict[str, Any]:
    """Options of ``deberta``; -1 stands for "none" in this family's configurations."""
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
    table=with_head(ENCODER, HEAD),
    prefix="deberta.",
    aliases={
        "cls.predictions.transform.dense.weight": "lm_predictions.lm_head.dense.weight",
        "cls.predictions.transform.dense.bias": "lm_predictions.lm_head.dense.bias",
        "cls.predictions.transform.LayerNorm.weight": "lm_predictions.lm_head.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias": "lm_predictions.lm_head.LayerNorm.bias",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    },
    ignored=(
        "deberta.embeddings.position_ids",
        "cls.predictions.decoder.{kind}",
        # constant over the keys of a query: cancelled by the softmax
        LAYER + ".pos_key_proj.bias",
    ),
)
