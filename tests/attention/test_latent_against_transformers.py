"""Latent attention against DeepSeek-V3's and Mistral 4's of transformers, with their weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DynamicCache, Mistral4Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mistral4 import modeling_mistral4 as mistral

from posenc import Encoding, Grid, Layout, create
from posenc.attention import LatentAttention, LayerCache
from posenc.extension import log_n, yarn

SIZES: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}

NAMES = {
    "q_proj": "query",
    "q_b_proj": "query",
    "q_a_proj": "query_down",
    "q_a_layernorm": "query_norm",
    "kv_a_proj_with_mqa": "down",
    "kv_a_layernorm": "norm",
    "kv_b_proj": "up",
    "o_proj": "output",
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "DeepSeek-V3": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "DeepSeek-V2": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "Mistral 4": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}


def encoding_of(kind: str) -> Encoding:
    rope = create("rope", head_dim=8, pairing="adjacent")
    if kind == "default":
        return rope
    mscale = ROPES[kind]["mscale_all_dim"]
    temperature = 0.1 * mscale * math.log(40) + 1 if mscale != 1 else None
    stretched: Encoding = yarn(
        rope, factor=40, length=64, alpha=0.5, beta=4.0, temperature=temperature
    )
    if kind != "Mistral 4":
        return stretched
    scaled: Encoding = log_n(stretched, length=64, growth=0.1, form="ministral3")
    return scaled


class Pair:
    """An attention layer of transformers in float64, and posenc's with its weights."""

    def __init__(self, kind: str, *, low_rank: bool) -> None:
        torch.manual_seed(0)
        fields = SIZES | {"q_lora_rank": 20 if low_rank else None, "rope_parameters": ROPES[kind]}
        fields |= {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
        modeling: Any = mistral if kind == "Mistral 4" else deepseek
        of_config: Any = Mistral4Config if kind == "Mistral 4" else DeepseekV3Config
        config = of_config(**fields, max_position_embeddings=2560, num_hidden_layers=1)
        config._attn_implementation = "sdpa"  # the eager one has its softmax in float32
        family = "Mistral4" if kind == "Mistral 4" else "DeepseekV3"
        self.theirs = getattr(modeling, f"{family}Attention")(config, 0).double().eval()
        self.rotary = getattr(modeling, f"{family}RotaryEmbedding")(config)
        for parameter in self.theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.encoding = encoding_of(kind)
        sizes = SIZES | {"q_lora_rank": fields["q_lora_rank"]}
        self.own = LatentAttention(dim=48, heads=4, encoding=self.encoding, causal=True, **sizes)
        weights = {
            f"{NAMES[name.split('.')[0]]}.weight": weight
            for name, weight in self.theirs.state_dict().items()
        }
        self.own.double().load_state_dict(weights)

    def widen(self) -> None:
        """Have transformers' norms, which are in float32 whatever comes, compute in float64."""
        for name, norm in list(self.theirs.named_children()):
            if name.endswith("layernorm"):
                wide = nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon, dtype=torch.float64)
                wide.load_state_dict(norm.state_dict())
                setattr(self.theirs, name, wide)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines as transformers', of frequencies that are not rounded to float32."""
        part: Any = self.encoding.query_key
        speeds = getattr(part, "inner", part).frequencies(like=positions.double())
        torch.testing.assert_close(self.rotary.inv_freq.double(), speeds, rtol=1e-6, atol=0)
        both = torch.cat([positions.double().unsqueeze(-1) * speeds] * 2, dim=-1)
        gain = self.rotary.attention_scaling
        return both.cos() * gain, both.sin() * gain

    def call(self, x: Tensor, layout: Layout, keys: Layout, cache: Any = None) -> Tensor:
        """The output of transformers' layer."""
        positions = layout.positions[..., 0].long().expand(len(x), -1)
        visible = Grid(layout, keys, causal=True, window=None).visible
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e30)
        with torch.no_grad():
            output: Tensor = self.theirs(
                x,
                position_embeddings=self.angles(positions),
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
            )[0]
        return output


@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("kind", ROPES)
def test_equals_transformers(kind: str, low_rank: bool) -> None:
    """Whole, padded and step by step, beyond the length that YaRN was trained for."""
    pair, length = Pair(kind, low_rank=low_rank), 12
    x = torch.randn(2, length, 48, dtype=torch.float64)
    bound = 1e-8 if kind == "Mistral 4" else 1e-11  # whose factor of logits is in float32
    close = partial(torch.testing.assert_close, rtol=bound, atol=bound)
    far, padded = Layout.sequence(length, 60), Layout.padded([length, 7], side="left")
    with torch.no_grad():
        whole = pair.own(x, far)
        torch.testing.assert_close(whole, pair.call(x, far, far), rtol=1e-4, atol=1e-5)
        pair.widen()
        close(whole, pair.call(x, far, far))
        assert padded.valid is not None
        got, expected = pair.own(x, padded), pair.call(x, padded, padded)
        close(got[padded.valid], expected[padded.valid])
        cache, past = LayerCache(), DynamicCache()
        for begin, end in ((0, 8), (8, 9), (9, 10), (10, length)):
            here, there = far.slice(begin, end), far.slice(0, end)
            got = pair.own(x[:, begin:end], here, cache=cache)
            expected = pair.call(x[:, begin:end], here, there, past)
            close(got, expected)
            close(got, whole[:, begin:end])
    assert cache.keys is not None
    theirs = past.layers[0]
    # Both have the latent first; transformers' rotation leaves the pairs in another order.
    close(cache.keys[..., :32], theirs.keys)
    assert cache.keys.numel() == theirs.keys.numel() + theirs.values.numel()
