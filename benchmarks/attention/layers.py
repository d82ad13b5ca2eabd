"""Whole attention layers, projections included: posenc's, and other libraries' own modules.

All map ``[1, L, C]`` to the same shape, with equal heads, and are measured against the same layer
without positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from benchmarks.attention.contenders import Contender
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention import Attention
from posenc.lab.bench.passes import Pass, TimedCall, parse_name

VOCABULARY = 8
"""Vocabulary of the models that modules are taken from: what their special tokens need."""

Made = tuple[nn.Module, Callable[[Tensor], Any]]
"""A module, and the function from token vectors to token vectors that runs it."""


class LayerContender(Contender):
    """A module from token vectors to token vectors."""

    level: ClassVar[str] = "layer"

    @abstractmethod
    def make(self, call: TimedCall) -> Made:
        """The module, and the function that runs it."""

    def prepare(self, call: TimedCall) -> Pass:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, step = self.make(call)
        module.to(call.x.device, call.x.dtype).eval()
        x = call.x.detach().clone().requires_grad_()
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        return Pass(lambda: step(x), wanted, call.x)


class PlainLayer(LayerContender):
    """Four projections around plain SDPA."""

    name = "plain layer"

    def make(self, call: TimedCall) -> Made:
        width = call.x.shape[-1]
        inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        shape = (1, call.case.length, call.case.heads, call.case.head_dim)

        def step(x: Tensor) -> Any:
            q, k, v = (project(x).view(shape).transpose(1, 2) for project in inner[:3])
            output = scaled_dot_product_attention(q, k, v, is_causal=call.case.causal)
            return inner[3](output.transpose(1, 2).flatten(2))

        return inner, step


class PosencLayer(LayerContender):
    """``posenc.Attention`` with the case's encoding."""

    name = "posenc layer"

    def make(self, call: TimedCall) -> Made:
        case = call.case
        layer = Attention(
            dim=call.x.shape[-1], heads=case.heads, encoding=call.encoding, causal=case.causal
        )
        return layer, lambda x: layer(x, call.layout)


class LibraryLayer(LayerContender):
    """A module of another library, for the encodings that it has."""

    foreign: ClassVar[bool] = True
    package: ClassVar[str]
    makers: ClassVar[dict[str, Callable[[TimedCall], Made]]]

    def refusal(self, call: TimedCall) -> str | None:
        name = parse_name(call.case.encoding)[0]
        if name not in self.makers:
            return "no such module of it is known here"
        if find_spec(self.package) is None:
            return "it is not installed (pip install 'posenc[bench]')"
        if call.case.causal:
            return "it is measured without a causal mask only"
        return None

    def make(self, call: TimedCall) -> Made:
        return self.makers[parse_name(call.case.encoding)[0]](call)


def _x_library() -> Any:
    return import_module("x_transformers.x_transformers")


def _x_attention(call: TimedCall) -> nn.Module:
    case = call.case
    attention: nn.Module = _x_library().Attention(
        dim=call.x.shape[-1], dim_head=case.head_dim, heads=case.heads, flash=True
    )
    return attention


def _x_bias(bias: nn.Module, call: TimedCall) -> Made:
    attention, length = _x_attention(call), call.case.length
    both = nn.ModuleList([attention, bias])
    return both, lambda x: attention(x, attn_bias=bias(length, length))


def _x_t5(call: TimedCall) -> Made:
    case = call.case
    bias = _x_library().RelativePositionBias(scale=case.head_dim**0.5, heads=case.heads)
    return _x_bias(bias, call)


def _x_alibi(call: TimedCall) -> Made:
    return _x_bias(_x_library().AlibiPositionalBias(heads=call.case.heads), call)


def _x_dynamic(call: TimedCall) -> Made:
    width = call.x.shape[-1] // 4  # as in its Encoder
    bias = _x_library().DynamicPositionBias(dim=width, heads=call.case.heads, depth=2)
    return _x_bias(bias, call)


def _x_rope(call: TimedCall) -> Made:
    attention, rotary = _x_attention(call), _x_library().RotaryEmbedding(call.case.head_dim)

    def step(x: Tensor) -> Any:
        return attention(x, rotary_pos_emb=rotary.forward_from_seq_len(x.shape[1]))

    return nn.ModuleList([attention, rotary]), step


class XTransformers(LibraryLayer):
    """``x_transformers.Attention`` with its fused option, and its position biases."""

    name = "x-transformers"
    package = "x_transformers"
    makers: ClassVar[dict[str, Callable[[TimedCall], Made]]] = {
        "alibi": _x_alibi,
        "dynamic_bias": _x_dynamic,
        "rope": _x_rope,
        "t5": _x_t5,
    }


def _sizes(call: TimedCall) -> dict[str, Any]:
    """Sizes by their usual names in transformers."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": call.x.shape[-1],
        "num_hidden_layers": 1,
        "num_attention_heads": call.case.heads,
        "intermediate_size": 2,
    }


def _library() -> Any:
    return import_module("transformers")


def _hf_t5(call: TimedCall) -> Made:
    config = _library().T5Config(
        vocab_size=VOCABULARY,
        d_model=call.x.shape[-1],
        d_kv=call.case.head_dim,
        num_heads=call.case.heads,
        num_layers=1,
        d_ff=2,
        dropout_rate=0.0,
    )
    attention = _library().T5EncoderModel(config).encoder.block[0].layer[0].SelfAttention
    return attention, lambda x: attention(x)[0]


def _hf_bloom(call: TimedCall) -> Made:
    case = call.case
    config = _library().BloomConfig(
        vocab_size=VOCABULARY, hidden_size=call.x.shape[-1], n_layer=1, n_head=case.heads
    )
    model = _library().BloomModel(config)
    attention = model.h[0].self_attention
    present = torch.ones(1, case.length, device=call.x.device)
    alibi = model.build_alibi_tensor(present, case.heads, call.x.dtype)
    return attention, lambda x: attention(x, torch.zeros_like(x), alibi, None)[0]


def _hf_llama(call: TimedCall) -> Made:
    model = _library().LlamaModel(_library().LlamaConfig(**_sizes(call)))
    attention, rotary = model.layers[0].self_attn, model.rotary_emb
    attention.is_causal = False
    order = torch.arange(call.case.length, device=call.x.device).unsqueeze(0)

    def step(x: Tensor) -> Any:
        return attention(x, position_embeddings=rotary(x, order), attention_mask=None)[0]

    return nn.ModuleList([attention, rotary]), step


def _hf_deberta(call: TimedCall) -> Made:
    config = _library().DebertaV2Config(
        **_sizes(call),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    encoder = _library().DebertaV2Model(config).encoder
    attention, length = encoder.layer[0].attention, call.case.length
    seen = torch.ones(1, 1, length, length, device=call.x.device).bool()

    def step(x: Tensor) -> Any:
        relative, rows = encoder.get_rel_pos(x), encoder.get_rel_embedding()
        return attention(x, seen, relative_pos=relative, rel_embeddings=rows)[0]

    return nn.ModuleList([attention, encoder.rel_embeddings]), step


def _hf_xlnet(call: TimedCall) -> Made:
    config = _library().XLNetConfig(
        vocab_size=VOCABULARY,
        d_model=call.x.shape[-1],
        n_layer=1,
        n_head=call.case.heads,
        d_inner=2,
        dropout=0.0,
    )
    model = _library().XLNetModel(config)
    attention = model.layer[0].rel_attn

    def step(x: Tensor) -> Any:
        length = x.shape[1]
        distances = model.relative_positional_encoding(length, length, bsz=1, device=x.device)
        given = x.transpose(0, 1)
        return attention(given, None, None, None, distances.to(x.dtype), None)[0].transpose(0, 1)

    return attention, step


class Transformers(LibraryLayer):
    """The attention modules of T5, BLOOM (ALiBi), Llama (RoPE), DeBERTa-v2 and XLNet."""

    name = package = "transformers"
    makers: ClassVar[dict[str, Callable[[TimedCall], Made]]] = {
        "alibi": _hf_bloom,
        "deberta": _hf_deberta,
        "rope": _hf_llama,
        "t5": _hf_t5,
        "xlnet": _hf_xlnet,
    }


LAYERS = tuple(sorted({*XTransformers.makers, *Transformers.makers}))
"""Encodings for which another library has a module."""
