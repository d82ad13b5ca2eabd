"""Decoders of posenc as Llamas of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.models import Decoder
from posenc.transformers.checkpoints.rope import parameters_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

DESCRIBED = {
    "activation": ("swiglu",),
    "norm": ("rms",),
    "norm_first": (True,),
    "parallel": (False,),
    "merged": (False,),
    "embedding_norm": (False,),
    "scale": (None,),
    "sinks": (False,),
    "softcap": (None,),
    "window": (None,),
    "biases": ("all", "none"),
}
"""Fields of a decoder's configuration with the values that a Llama has."""

NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.input": "mlp.gate_proj mlp.up_proj",
    "feed_forward.output": "mlp.down_proj",
}
"""Layers of a block by their names in a Llama's, where the gated input layer is two."""


def as_llama(decoder: Decoder) -> LlamaForCausalLM:
    """A Llama with the weights and the rotation of a decoder, in eval mode, on the CPU.

    A factor of the embedding (√C) is multiplied into its weights, which unties the output layer.

    Raises:
        ArgumentError: for a decoder that is no Llama.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = decoder.config
    for name, values in DESCRIBED.items():
        if getattr(config, name) not in values:
            raise _other(f"{name}={values[0]!r}", f"{name}={getattr(config, name)!r}")
    part = decoder.encodings[0].query_key
    ropes = [parameters_of(encoding, config.max_length) for encoding in decoder.encodings]
    if any(rope != ropes[0] for rope in ropes):
        raise _other("one encoding for all layers", "several")
    if not isinstance(part, Rope):
        raise _other("frequencies for texts of any length", type(part).__name__)
    if ropes[0].pop("partial_rotary_factor") != 1:
        raise _other("rope with fraction=1", f"fraction={part.fraction:g}")
    tied = config.tied and config.embedding_factor == 1
    lengths = {} if config.max_length is None else {"max_position_embeddings": config.max_length}
    with torch.random.fork_rng(devices=[]):
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.dim,
                intermediate_size=config.feed_forward_width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads or config.heads,
                head_dim=config.head_dim or config.dim // config.heads,
                rms_norm_eps=1e-6 if config.norm_eps is None else config.norm_eps,
                attention_bias=config.biases == "all",
                mlp_bias=config.bias,
                tie_word_embeddings=tied,
                rope_parameters=ropes[0],
                bos_token_id=None,
                eos_token_id=None,
                **lengths,
            )
        )
    embedding = decoder.embedding.weight
    weights = {
        "model.embed_tokens.weight": embedding * config.embedding_factor,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": embedding if decoder.output is None else decoder.output.weight,
    }
    for index, block in enumerate(decoder.blocks):
        for ours, theirs in NAMES.items():
            names = [f"model.layers.{index}.{name}" for name in theirs.split()]
            for kind, tensor in block.get_submodule(ours).named_parameters():
                parts = zip(names, tensor.chunk(len(names)), strict=True)
                weights |= {f"{name}.{kind}": part for name, part in parts}
    llama.load_state_dict(weights, strict=True)
    return llama.eval()


def _other(expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "model",
        expected=f"a Llama, with {expected}",
        got=got,
        remedy="Save it by model.save(folder), which supports every decoder.",
    )
