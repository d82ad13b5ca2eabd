"""Whole attention layers, projections included: posenc's, and other libraries' own modules.

All read ``[1, L, C]`` and write the same, with as many heads of the same width, and are measured
against the same layer without positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from posenc.attention import Attention
from posenc.bench.case import Call, parse_name
from posenc.bench.contenders import Contender, Level, Prepared

__all__ = ["LAYERS", "LayerContender", "PlainLayer", "PosencLayer", "Transformers", "XTransformers"]

PLAIN_LAYER = "plain layer"

VOCABULARY = 8
"""Words of the models that modules are taken from: what their special tokens need."""

Step = Callable[[Tensor], Tensor]


class LayerContender(Contender):
    """A module from token vectors to token vectors."""

    level: ClassVar[Level] = "layer"

    @property
    def base(self) -> str:
        return PLAIN_LAYER

    @abstractmethod
    def make(self, call: Call) -> tuple[nn.Module, Step]:
        """The module, and what runs it."""

    def prepare(self, call: Call) -> Prepared:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, step = self.make(call)
        module.to(call.x.device, call.x.dtype).eval()
        x = call.x.detach().clone().requires_grad_()
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        return Prepared(lambda: step(x), wanted, call.x)


class PlainLayer(LayerContender):
    """Four projections around plain SDPA."""

    @property
    def name(self) -> str:
        return PLAIN_LAYER

    def make(self, call: Call) -> tuple[nn.Module, Step]:
        width = call.x.shape[-1]
        inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        shape = (1, call.case.length, call.case.heads, call.case.head_dim)

        def step(x: Tensor) -> Tensor:
            q, k, v = (project(x).view(shape).transpose(1, 2) for project in inner[:3])
            output = scaled_dot_product_attention(q, k, v, is_causal=call.case.causal)
            result: Tensor = inner[3](output.transpose(1, 2).flatten(2))
            return result

        return inner, step


class PosencLayer(LayerContender):
    """``posenc.Attention`` with the case's encoding."""

    @property
    def name(self) -> str:
        return "posenc layer"

    def make(self, call: Call) -> tuple[nn.Module, Step]:
        layer = Attention(
            dim=call.x.shape[-1],
            heads=call.case.heads,
            encoding=call.encoding,
            causal=call.case.causal,
        )
        return layer, lambda x: layer(x, call.layout)


class LibraryLayer(LayerContender):
    """A module of another library, for the encodings that it has."""

    foreign: ClassVar[bool] = True

    package: ClassVar[str]
    makers: ClassVar[dict[str, Callable[[Call], tuple[nn.Module, Step]]]]

    @property
    def name(self) -> str:
        return self.package.replace("_", "-")

    def refusal(self, call: Call) -> str | None:
        name = parse_name(call.case.encoding)[0]
        if name not in self.makers:
            return "no such module of it is known here"
        if find_spec(self.package) is None:
            return "it is not installed (pip install 'posenc[bench]')"
        if call.case.causal:
            return "it is measured without a causal mask only"
        return None

    def make(self, call: Call) -> tuple[nn.Module, Step]:
        return self.makers[parse_name(call.case.encoding)[0]](call)


def _x_attention(call: Call) -> nn.Module:
    library = import_module("x_transformers.x_transformers")
    case = call.case
    module: nn.Module = library.Attention(
        dim=call.x.shape[-1], dim_head=case.head_dim, heads=case.heads, flash=True
    )
    return module


def _x_bias(bias: nn.Module, call: Call) -> tuple[nn.Module, Step]:
    attention, length = _x_attention(call), call.case.length

    def step(x: Tensor) -> Tensor:
        output: Tensor = attention(x, attn_bias=bias(length, length))
        return output

    return nn.ModuleList([attention, bias]), step


def _x_t5(call: Call) -> tuple[nn.Module, Step]:
    library = import_module("x_transformers.x_transformers")
    scale = call.case.head_dim**0.5
    return _x_bias(library.RelativePositionBias(scale=scale, heads=call.case.heads), call)


def _x_alibi(call: Call) -> tuple[nn.Module, Step]:
    library = import_module("x_transformers.x_transformers")
    return _x_bias(library.AlibiPositionalBias(heads=call.case.heads), call)


def _x_dynamic(call: Call) -> tuple[nn.Module, Step]:
    library = import_module("x_transformers.x_transformers")
    width = call.x.shape[-1] // 4  # as its Encoder makes it
    made = library.DynamicPositionBias(dim=width, heads=call.case.heads, depth=2)
    return _x_bias(made, call)


def _x_rope(call: Call) -> tuple[nn.Module, Step]:
    library = import_module("x_transformers.x_transformers")
    attention, rotary = _x_attention(call), library.RotaryEmbedding(call.case.head_dim)

    def step(x: Tensor) -> Tensor:
        angles = rotary.forward_from_seq_len(x.shape[1])
        output: Tensor = attention(x, rotary_pos_emb=angles)
        return output

    return nn.ModuleList([attention, rotary]), step


class XTransformers(LibraryLayer):
    """``x_transformers.Attention`` with its fused option, and its position biases."""

    package = "x_transformers"
    makers: ClassVar[dict[str, Callable[[Call], tuple[nn.Module, Step]]]] = {
        "alibi": _x_alibi,
        "dynamic_bias": _x_dynamic,
        "rope": _x_rope,
        "t5": _x_t5,
    }


def _sizes(call: Call) -> dict[str, Any]:
    """Sizes, as most configurations of transformers call them."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": call.x.shape[-1],
        "num_hidden_layers": 1,
        "num_attention_heads": call.case.heads,
        "intermediate_size": 2,
    }


def _library() -> Any:
    return import_module("transformers")


def _hf_t5(call: Call) -> tuple[nn.Module, Step]:
    library, case = _library(), call.case
    config = library.T5Config(
        vocab_size=VOCABULARY,
        d_model=call.x.shape[-1],
        d_kv=case.head_dim,
        num_heads=case.heads,
        num_layers=1,
        d_ff=2,
        dropout_rate=0.0,
    )
    attention = library.T5EncoderModel(config).encoder.block[0].layer[0].SelfAttention
    return attention, lambda x: attention(x)[0]


def _hf_bloom(call: Call) -> tuple[nn.Module, Step]:
    library, case = _library(), call.case
    config = library.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=call.x.shape[-1], n_layer=1, n_head=case.heads
    )
    model = library.BloomModel(config)
    attention = model.h[0].self_attention
    present = torch.ones(1, case.length, device=call.x.device)
    alibi = model.build_alibi_tensor(present, case.heads, call.x.dtype)

    def step(x: Tensor) -> Tensor:
        output: Tensor = attention(x, torch.zeros_like(x), alibi, None)[0]
        return output

    return attention, step


def _hf_llama(call: Call) -> tuple[nn.Module, Step]:
    library = _library()
    model = library.LlamaModel(library.LlamaConfig(**_sizes(call)))
    attention, rotary = model.layers[0].self_attn, model.rotary_emb
    attention.is_causal = False
    order = torch.arange(call.case.length, device=call.x.device).unsqueeze(0)
    both = nn.ModuleList([attention, rotary])

    def step(x: Tensor) -> Tensor:
        output: Tensor = attention(x, position_embeddings=rotary(x, order), attention_mask=None)[0]
        return output

    return both, step


def _hf_deberta(call: Call) -> tuple[nn.Module, Step]:
    library = _library()
    config = library.DebertaV2Config(
        **_sizes(call),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    encoder = library.DebertaV2Model(config).encoder
    attention = encoder.layer[0].attention
    seen = torch.ones(1, 1, call.case.length, call.case.length, device=call.x.device).bool()

    def step(x: Tensor) -> Tensor:
        output: Tensor = attention(
            x,
            seen,
            relative_pos=encoder.get_rel_pos(x),
            rel_embeddings=encoder.get_rel_embedding(),
        )[0]
        return output

    return nn.ModuleList([attention, encoder.rel_embeddings]), step


def _hf_xlnet(call: Call) -> tuple[nn.Module, Step]:
    library, case = _library(), call.case
    config = library.XLNetConfig(
        vocab_size=VOCABULARY,
        d_model=call.x.shape[-1],
        n_layer=1,
        n_head=case.heads,
        d_inner=2,
        dropout=0.0,
    )
    model = library.XLNetModel(config)
    attention = model.layer[0].rel_attn

    def step(x: Tensor) -> Tensor:
        length = x.shape[1]
        distances = model.relative_positional_encoding(length, length, bsz=1, device=x.device)
        given = x.transpose(0, 1)
        output: Tensor = attention(given, None, None, None, distances.to(x.dtype), None)[0]
        return output.transpose(0, 1)

    return attention, step


class Transformers(LibraryLayer):
    """The attention modules of T5, BLOOM (ALiBi), Llama (RoPE), DeBERTa-v2 and XLNet."""

    package = "transformers"
    makers: ClassVar[dict[str, Callable[[Call], tuple[nn.Module, Step]]]] = {
        "alibi": _hf_bloom,
        "deberta": _hf_deberta,
        "rope": _hf_llama,
        "t5": _hf_t5,
        "xlnet": _hf_xlnet,
    }


LAYERS = tuple(sorted({*XTransformers.makers, *Transformers.makers}))
"""Encodings that another library has a module for."""
