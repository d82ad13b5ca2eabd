"""GPT-NeoX and Pythia."""

from __future__ import annotations

from torch import nn

from posenc.integrations.transformers.checkpoints.families import common
from posenc.integrations.transformers.checkpoints.family import Family, Written, require_config
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, split_by_head
from posenc.integrations.transformers.checkpoints.rope import RopeFields, rope_decoder
from posenc.models import Decoder
from posenc.models.block import Activation
from posenc.models.checkpoint import stored_tensors

LAYER = "gpt_neox.layers.{layer}"

TABLE: Table = {
    "embedding.weight": "gpt_neox.embed_in.weight",
    "blocks.{layer}.attention_norm.{kind}": LAYER + ".input_layernorm.{kind}",
    "blocks.{layer}.attention.merged.{kind}": split_by_head(
        LAYER + ".attention.query_key_value.{kind}"
    ),
    "blocks.{layer}.attention.output.{kind}": LAYER + ".attention.dense.{kind}",
    "blocks.{layer}.feed_forward_norm.{kind}": LAYER + ".post_attention_layernorm.{kind}",
    "blocks.{layer}.feed_forward.input.{kind}": LAYER + ".mlp.dense_h_to_4h.{kind}",
    "blocks.{layer}.feed_forward.output.{kind}": LAYER + ".mlp.dense_4h_to_h.{kind}",
    "norm.{kind}": "gpt_neox.final_layer_norm.{kind}",
    "output.weight": "embed_out.weight",
}

ROPE = RopeFields(base="rotary_emb_base", fraction="rotary_pct", rotated=0.25, partial=True)

ACTIVATIONS: dict[str, Activation] = {**common.ACTIVATIONS, "gelu_fast": "gelu_tanh"}


def make(fields: Fields) -> Decoder:
    """The decoder of a configuration."""
    shape = common.read_shape(fields, eps=1e-5, activations=ACTIVATIONS)
    return rope_decoder(
        ROPE.read(fields, head_dim=shape["dim"] // shape["heads"]),
        **shape,
        norm="layer",
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
        raise common.wrong_model(model, "a Decoder")
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
    fields = common.write_shape(config, activations=ACTIVATIONS) | {
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
    rope=ROPE,
)
