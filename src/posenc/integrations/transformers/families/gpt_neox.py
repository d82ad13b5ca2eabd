"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from torch import nn

from posenc.errors import ArgumentError
from posenc.integrations.transformers.config import Fields
from posenc.integrations.transformers.family import (
    Family,
    Written,
    require_config,
    stored_tensors,
)
from posenc.integrations.transformers.mapping import SplitByHead, Table
from posenc.integrations.transformers.rope import RopeFields, rope_decoder
from posenc.models import Decoder
from posenc.models.block import Activation

__all__ = ["ENTRY"]

LAYER = "gpt_neox.layers.{layer}"

TABLE: Table = {
    "embedding.weight": "gpt_neox.embed_in.weight",
    "blocks.{layer}.attention_norm.{kind}": LAYER + ".input_layernorm.{kind}",
    "blocks.{layer}.attention.merged.{kind}": SplitByHead(
        LAYER + ".attention.query_key_value.{kind}"
    ),
    "blocks.{layer}.attention.output.{kind}": LAYER + ".attention.dense.{kind}",
    "blocks.{layer}.feed_forward_norm.{kind}": LAYER + ".post_attention_layernorm.{kind}",
    "blocks.{layer}.feed_forward.input.{kind}": LAYER + ".mlp.dense_h_to_4h.{kind}",
    "blocks.{layer}.feed_forward.output.{kind}": LAYER + ".mlp.dense_4h_to_h.{kind}",
    "norm.{kind}": "gpt_neox.final_layer_norm.{kind}",
    "output.weight": "embed_out.weight",
}

SIZES = {
    "vocabulary": "vocab_size",
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}

ROPE = RopeFields(base="rotary_emb_base", fraction="rotary_pct", rotated=0.25, partial=True)

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def make(fields: Fields) -> Decoder:
    """The decoder of a configuration."""
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    return rope_decoder(
        ROPE.read(fields, head_dim=sizes["dim"] // sizes["heads"]),
        **sizes,
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        parallel=fields.flag("use_parallel_residual", True),
        bias=True,
        attention_bias="all" if fields.flag("attention_bias", True) else "none",
        merged=True,
        tied=fields.flag("tie_word_embeddings", False),
        embedding_scale=1.0,
        max_length=fields.optional_count("max_position_embeddings"),
    )


def write(model: nn.Module, like: Fields) -> Written:
    """Configuration and tensors of a decoder shaped like GPT-NeoX."""
    if not isinstance(model, Decoder):
        raise ArgumentError(
            "model", expected="a Decoder", got=type(model).__name__, remedy="Use another family."
        )
    config = model.config
    require_config(
        config,
        norm="layer",
        norm_first=True,
        merged=True,
        bias=True,
        embedding_norm=False,
        embedding_factor=1.0,
        window=None,
        scale=None,
    )
    if config.biases == "inputs":
        require_config(config, biases="all")
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in activations or config.kv_heads not in (None, config.heads):
        require_config(config, activation="gelu", kv_heads=None)
    fields: dict[str, Any] = {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": config.feed_forward_width,
        "hidden_act": activations[config.activation],
        "layer_norm_eps": 1e-5 if config.norm_eps is None else config.norm_eps,
        "use_parallel_residual": config.parallel,
        "attention_bias": config.biases == "all",
        "tie_word_embeddings": config.tied,
    }
    if config.max_length is not None:
        fields["max_position_embeddings"] = config.max_length
    fields |= ROPE.write(model, like)
    return Written(fields, stored_tensors(model), "GPTNeoXForCausalLM")


ENTRY = Family(
    make=make,
    table=TABLE,
    prefix="gpt_neox.",
    aliases={"embed_out.weight": "lm_head.weight"},
    ignored=(
        "embed_out.weight",
        LAYER + ".attention.bias",
        LAYER + ".attention.masked_bias",
        LAYER + ".attention.rotary_emb.inv_freq",
    ),
    write=write,
)
