"""T5 versions 1.0 and 1.1: encoder–decoder or encoder only."""

from __future__ import annotations

from typing import Any

from posenc.integrations.transformers.checkpoints.family import Family
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, stacked, transposed
from posenc.models import Encoder, EncoderConfig, Transformer, TransformerConfig
from posenc.models.block import Activation


def _attention(ours: str, theirs: str) -> Table:
    layers = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return {f"{ours}.{a}.weight": f"{theirs}.{b}.weight" for a, b in layers.items()}


FEED_FORWARD = {
    "encoder": "encoder.block.{layer}.layer.1",
    "decoder": "decoder.block.{layer}.layer.2",
}
"""Index of the feed-forward sub-layer; the decoder's second sub-layer is cross-attention."""


def _stack(side: str, blocks: str, norm: str) -> Table:
    """Rules of the blocks of one side and its final norm."""
    ours, attention = blocks + ".{layer}", side + ".block.{layer}.layer.0"
    feed_forward = FEED_FORWARD[side]
    return {
        f"{blocks}.0.attention.encoding.score.table": transposed(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
        **_attention(f"{ours}.attention", f"{attention}.SelfAttention"),
        f"{ours}.attention_norm.weight": f"{attention}.layer_norm.weight",
        f"{ours}.feed_forward.input.weight": f"{feed_forward}.DenseReluDense.wi.weight",
        f"{ours}.feed_forward.output.weight": f"{feed_forward}.DenseReluDense.wo.weight",
        f"{ours}.feed_forward_norm.weight": f"{feed_forward}.layer_norm.weight",
        f"{norm}.weight": f"{side}.final_layer_norm.weight",
    }


CROSS = "decoder.block.{layer}.layer.1"

TABLE: Table = {
    "source_embedding.weight": "shared.weight",
    **_stack("encoder", "encoder", "encoder_norm"),
    **_stack("decoder", "decoder", "decoder_norm"),
    **_attention("decoder.{layer}.cross", f"{CROSS}.EncDecAttention"),
    "decoder.{layer}.cross_norm.weight": CROSS + ".layer_norm.weight",
    "output.weight": "lm_head.weight",
    # of an encoder-only checkpoint
    "embedding.weight": "shared.weight",
    **_stack("encoder", "blocks", "norm"),
}

GATED: Table = {
    f"{ours}.{{layer}}.feed_forward.input.weight": stacked(
        theirs + ".DenseReluDense.wi_0.weight", theirs + ".DenseReluDense.wi_1.weight"
    )
    for ours, theirs in {**FEED_FORWARD, "blocks": FEED_FORWARD["encoder"]}.items()
}

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}


def make(fields: Fields) -> Transformer | Encoder:
    """The encoder–decoder of a configuration, or the encoder if the file has no decoder."""
    dim, layers = fields.count("d_model"), fields.count("num_layers")
    vocabulary = fields.count("vocab_size")
    options = {
        "buckets": fields.count("relative_attention_num_buckets", 32),
        "max_distance": fields.count("relative_attention_max_distance", 128),
    }
    shape: dict[str, Any] = {
        "dim": dim,
        "hidden": fields.count("d_ff"),
        "heads": fields.count("num_heads"),
        "head_dim": fields.count("d_kv"),
        "activation": fields.choice("feed_forward_proj", ACTIVATIONS, "relu"),
        "norm": "rms",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-6),
        "bias": False,
        "scale": 1.0,
        "embedding_scale": 1.0,
    }
    if fields.tensors and not any(name.startswith("decoder.") for name in fields.tensors):
        alone = EncoderConfig(
            **shape,
            vocabulary=vocabulary,
            layers=layers,
            norm_first=True,
            encoding="t5",
            options=options,
        )
        return Encoder(alone)
    # version 1.0 ties and scales the output layer, version 1.1 does neither
    scaled = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    config = TransformerConfig(
        source_vocabulary=vocabulary,
        target_vocabulary=vocabulary,
        **shape,
        encoder_layers=layers,
        decoder_layers=fields.optional_count("num_decoder_layers") or layers,
        encoder_encoding="t5",
        decoder_encoding="t5",
        encoder_options=options,
        decoder_options=options,
        shared=True,
        tied="lm_head.weight" not in fields.tensors,
        output_scale=dim**-0.5 if scaled else 1.0,
    )
    return Transformer(config)


ENTRY = Family(
    make=make,
    table=TABLE,
    gated=GATED,
    aliases={"shared.weight": "encoder.embed_tokens.weight"},
    ignored=(
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        f"{CROSS}.EncDecAttention.relative_attention_bias.weight",
    ),
)
