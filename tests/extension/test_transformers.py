"""Stretched ropes against transformers' own, frequencies and rotated queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotate
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_rotate

from posenc import Grid, Layout, create
from posenc.encodings.query_key.rope import Rope
from posenc.extension import EXTENSIONS, extend

LENGTH = 64

CASES: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("interpolate", {}, {"rope_type": "linear"}),
    ("yarn", {}, {"rope_type": "yarn"}),
    ("yarn", {"truncate": False}, {"rope_type": "yarn", "truncate": False}),
    (
        "yarn",
        {"alpha": 0.5, "beta": 4.0},
        {"rope_type": "yarn", "beta_slow": 0.5, "beta_fast": 4.0},
    ),
    ("yarn", {"temperature": 1.3}, {"rope_type": "yarn", "attention_factor": 1.3}),
    ("yarn", {"alpha": 11.0}, {"rope_type": "yarn", "beta_slow": 11.0}),
    (
        "yarn",
        {"alpha": 40.0, "beta": 64.0},
        {"rope_type": "yarn", "beta_slow": 40.0, "beta_fast": 64.0},
    ),
    ("llama3", {}, {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    (
        "llama3",
        {"low": 0.5, "high": 8.0},
        {"rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    ),
]


def config(parameters: dict[str, object], *, length: int, fraction: float = 1.0) -> LlamaConfig:
    told = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=length
    )
    told.rope_parameters = {
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": length,
        "partial_rotary_factor": fraction,
    } | parameters
    return told


@pytest.mark.parametrize("length", [LENGTH, 4096])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("method", "options", "parameters"), CASES)
def test_frequencies_and_factor(
    method: str,
    options: dict[str, object],
    parameters: dict[str, object],
    fraction: float,
    length: int,
) -> None:
    """vllm #48351, sglang #33558: YaRN's factor of the logits ignored or doubled."""
    told = config(parameters, length=length, fraction=fraction)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](told, "cpu")
    encoding = create("rope", head_dim=16, fraction=fraction)
    rope = extend(encoding, method, factor=4, length=length, **options).query_key
    assert isinstance(rope, Rope)
    torch.testing.assert_close(
        rope.frequencies(like=torch.empty(())), expected, rtol=2e-6, atol=0.0
    )
    assert rope.gain == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [7, 63, 64, 65, 128, 200])
def test_dynamic_ntk(length: int) -> None:
    """transformers #25104: each length from scratch, the boundary included."""
    q, k = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16)
    theirs = LlamaRotaryEmbedding(config({"rope_type": "dynamic"}, length=LENGTH))
    cosine, sine = theirs(q, torch.arange(length).unsqueeze(0))
    expected = llama_rotate(q, k, cosine, sine)
    encoding = extend(create("rope", head_dim=16), "dynamic_ntk", factor=4, length=LENGTH)
    assert encoding.query_key is not None
    got = encoding.query_key(q, k, Grid.of(Layout.sequence(length)))
    torch.testing.assert_close(got, tuple(expected), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [7, 63, 64, 65, 128, 200])
def test_longrope(length: int) -> None:
    """transformers #33129, onnxruntime-genai #1161: the switch is past L, not at it."""
    long, short = [1.0 + t for t in range(8)], [1.0 + t / 10 for t in range(8)]
    told = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        vocab_size=100,
        max_position_embeddings=4 * LENGTH,
        original_max_position_embeddings=LENGTH,
    )
    told.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": LENGTH,
        "factor": 4.0,
    }
    theirs = Phi3RotaryEmbedding(told)
    q, k = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16)
    cosine, sine = theirs(q, torch.arange(length).unsqueeze(0))
    expected = phi3_rotate(q, k, cosine, sine)
    encoding = extend(
        create("rope", head_dim=16),
        "longrope",
        factor=4,
        length=LENGTH,
        long_factors=long,
        short_factors=short,
    )
    assert encoding.query_key is not None
    got: tuple[Tensor, Tensor] = encoding.query_key(q, k, Grid.of(Layout.sequence(length)))
    torch.testing.assert_close(got, tuple(expected), atol=5e-5, rtol=1e-4)


def test_longrope_factor_by_hand() -> None:
    # √(1 + ln 4 / ln 64) = √(1 + 1/3)
    rope = extend(create("rope", head_dim=16), "longrope", factor=4, length=64).query_key
    assert rope is not None
    assert rope.gain == pytest.approx(math.sqrt(4 / 3))


def test_every_name_that_transformers_knows_is_held() -> None:
    held = {str(parameters["rope_type"]) for *_, parameters in CASES} | {"dynamic", "longrope"}
    claimed = {method.claims.transformers for method in EXTENSIONS.values()}
    assert claimed - {None, "default"} == held
    assert held <= set(ROPE_INIT_FUNCTIONS)
