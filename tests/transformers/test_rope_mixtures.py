"""RoPE in configs that have older and newer fields at once: every reader reads as transformers."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from posenc.encoding import Encoding
from posenc.encodings.query_key.rope import Rope
from posenc.transformers.checkpoints import TRAINED, parameters_of, scaling_of
from posenc.transformers.doctor.config_findings import rope_dicts
from posenc.transformers.engines import ModelConfig
from posenc.transformers.engines.transformers import TRANSFORMERS

ROTARY = {
    "llama": (LlamaRotaryEmbedding, "rope_theta"),
    "gpt_neox": (GPTNeoXRotaryEmbedding, "rotary_emb_base"),
}

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"max_position_embeddings": 96}

RAMP = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "rope_type": "default", "factor": 2.0},
    {"type": "linear", "factor": 2.0, "rope_theta": 50.0},
    {"rope_type": "yarn", "factor": 4.0, TRAINED: 24},
    {"type": "yarn", "factor": 4.0, "rope_theta": 200.0},
    {"rope_type": "llama3", "factor": 4.0, TRAINED: 24, **RAMP},
)
"""Values of ``rope_scaling`` and of ``rope_parameters``."""


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("base", [None, 300.0])
@pytest.mark.parametrize("trained", [None, 12])
def test_readers_read_mixtures_as_transformers(
    family: str, base: float | None, trained: int | None
) -> None:
    rotary, name = ROTARY[family]
    for old, new in product(ROPES, ROPES):
        optional = {"rope_scaling": old, "rope_parameters": new, name: base, TRAINED: trained}
        fields = SIZES | {"model_type": family}
        fields |= {key: value for key, value in optional.items() if value is not None}
        made: Any = rotary(CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(fields))))
        expected, gain = made.inv_freq, made.attention_scaling
        told = f"rope_scaling={old}, rope_parameters={new}"
        unlisted = family == "llama" and (old or new or base)
        kinds = [family, "of_no_library"] if unlisted else [family]
        for kind in kinds:
            config = ModelConfig.of(fields | {"model_type": kind})
            rotation = TRANSFORMERS.rotations(config, 20)[""]
            assert near(torch.tensor(rotation.frequencies), expected), f"{told} of {kind}"
            assert rotation.gain == pytest.approx(gain), f"{told} of {kind}"
        assert scaling_of(rope_dicts(fields)[""]) == made.rope_type, told


@pytest.mark.parametrize("gain", [1.0, 1.2])
@pytest.mark.parametrize(
    "divisors",
    [[2.0] * 16, [1.1**t for t in range(16)], [1.0 + t for t in range(16)]],
    ids=["equal", "of a base", "others"],
)
def test_written_parameters_are_read_as_the_rotation(divisors: list[float], gain: float) -> None:
    rope = Rope(head_dim=32).stretched(divisors, gain=gain)
    words = parameters_of(Encoding.of(rope), SIZES["max_position_embeddings"])
    made: Any = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=words))
    assert near(made.inv_freq, rope.frequencies(like=made.inv_freq))
    assert made.attention_scaling == pytest.approx(gain)


def near(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5)
