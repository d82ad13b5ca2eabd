"""Llama, Mistral and Qwen2, which differ in windows and biases."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from posenc.integrations.transformers.checkpoints.families.common import SIZES, wrong_model
from posenc.integrations.transformers.checkpoints.family import Family, Written, require_config
from posenc.integrations.transformers.checkpoints.fields import Fields
from posenc.integrations.transformers.checkpoints.mapping import Table, stacked
from posenc.integrations.transformers.checkpoints.rope import RopeFields, rope_decoder
from posenc.models import Decoder
from posenc.models.checkpoint import stored_tensors

LAYER = "model.layers.{layer}"

TABLE: Table = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.{layer}.attention_norm.weight": LAYER + ".input_layernorm.weight",
    "blocks.{layer}.attention.query.{kind}": LAYER + ".self_attn.q_proj.{kind}",
    "blocks.{layer}.attention.key.{kind}": LAYER + ".self_attn.k_proj.{kind}",
    "blocks.{layer}.attention.value.{kind}": LAYER + ".self_attn.v_proj.{kind}",
    "blocks.{layer}.attention.output.{kind}": LAYER + ".self_attn.o_proj.{kind}",
    "blocks.{layer}.feed_forward_norm.weight": LAYER + ".post_attention_layernorm.weight",
    "blocks.{layer}.feed_forward.input.{kind}": stacked(
        LAYER + ".mlp.gate_proj.{kind}", LAYER + ".mlp.up_proj.{kind}"
    ),
    "blocks.{layer}.feed_forward.output.{kind}": LAYER + ".mlp.down_proj.{kind}",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

IGNORED = ("lm_head.weight", LAYER + ".self_attn.rotary_emb.inv_freq")

ROPE = RopeFields()

Kind = Literal["llama", "mistral", "qwen2"]

ARCHITECTURES: dict[Kind, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


def make(fields: Fields, *, kind: Kind) -> Decoder:
    """The decoder of a configuration."""
    sizes: dict[str, Any] = {ours: fields.count(theirs) for ours, theirs in SIZES.items()}
    head_dim = fields.optional_count("head_dim") or sizes["dim"] // sizes["heads"]
    kv_heads = fields.optional_count("num_key_value_heads")
    return rope_decoder(
        ROPE.read(fields, head_dim=head_dim),
        **sizes,
        kv_heads=kv_heads or sizes["heads"],
        head_dim=head_dim,
        activation=fields.choice("hidden_act", {"silu": "swiglu"}, "silu"),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        bias=kind == "llama" and fields.flag("mlp_bias", False),
        attention_bias=_attention_bias(fields, kind),
        tied=fields.flag("tie_word_embeddings", False),
        embedding_scale=1.0,
        window=_window(fields, kind, sizes["layers"]),
        max_length=fields.optional_count("max_position_embeddings"),
    )


def write(model: nn.Module, like: Fields, *, kind: Kind) -> Written:
    """Configuration and tensors of a decoder shaped like Llama.

    An embedding scale (√C) is multiplied into the weights, which unties the output layer.
    """
    if not isinstance(model, Decoder):
        raise wrong_model(model, "a Decoder")
    config = model.config
    require_config(
        config,
        activation="swiglu",
        norm="rms",
        norm_first=True,
        parallel=False,
        merged=False,
        embedding_norm=False,
        scale=None,
    )
    if kind != "llama":
        require_config(config, bias=False, biases="inputs" if kind == "qwen2" else "none")
    elif config.biases == "inputs":
        require_config(config, biases="all")
    if kind != "mistral":
        require_config(config, window=None)
    tensors = stored_tensors(model)
    tied = config.tied and config.embedding_factor == 1.0
    if not tied:
        tensors["output.weight"] = tensors.get("output.weight", tensors["embedding.weight"])
    tensors["embedding.weight"] = tensors["embedding.weight"] * config.embedding_factor
    fields: dict[str, Any] = {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": config.feed_forward_width,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_dim or config.dim // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6 if config.norm_eps is None else config.norm_eps,
        "tie_word_embeddings": tied,
    }
    if config.max_length is not None:
        fields["max_position_embeddings"] = config.max_length
    if kind == "llama":
        fields |= {"attention_bias": config.biases == "all", "mlp_bias": config.bias}
    if kind == "mistral":
        fields["sliding_window"] = config.window
    fields |= ROPE.write(model, like)
    return Written(fields, tensors, ARCHITECTURES[kind])


def _attention_bias(fields: Fields, kind: Kind) -> Literal["all", "inputs", "none"]:
    if kind == "qwen2":
        return "inputs"
    return "all" if kind == "llama" and fields.flag("attention_bias", False) else "none"


def _window(fields: Fields, kind: Kind, layers: int) -> int | list[int | None] | None:
    """Window of all layers or of each (Qwen2: from layer ``max_window_layers`` on)."""
    if kind == "mistral":
        absent = fields.get("sliding_window", 4096) is None
        return None if absent else fields.count("sliding_window", 4096)
    if kind == "llama" or not fields.flag("use_sliding_window", False):
        return None
    window = fields.count("sliding_window", 4096)
    first = fields.count("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = fields.values.get("layer_types") or default
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= set(known):
        raise fields.wrong("layer_types", f"{layers} of {sorted(known)}", types)
    return [known[kind] for kind in types]


def llama_like(kind: Kind) -> Family:
    """The family of Llama or a variant with other windows and biases."""
    return Family(
        make=partial(make, kind=kind),
        table=TABLE,
        prefix="model.",
        ignored=IGNORED,
        write=partial(write, kind=kind),
        rope=ROPE,
    )


ENTRY = llama_like("llama")
