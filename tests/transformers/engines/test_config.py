"""RoPE's fields of a model type that transformers does not know, as they are written."""

from __future__ import annotations

import pytest

from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.engines.config import ModelConfig

WRITTEN = {
    "model_type": "of_no_library",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 500.0,
}


def test_all_of_a_head_is_rotated_unless_a_share_is_told() -> None:
    rope = ModelConfig.of(WRITTEN).ropes()[""]
    assert (rope.width, rope.head, rope.base, rope.longest) == (32, 32, 500.0, 2048)


@pytest.mark.parametrize("name", ["partial_rotary_factor", "rotary_pct", "rope_pct"])
def test_the_rotated_share_has_several_names(name: str) -> None:
    rope = ModelConfig.of(WRITTEN | {name: 0.25}).ropes()[""]
    assert (rope.width, rope.head) == (8, 32)


@pytest.mark.parametrize("name", ["rope_theta", "rotary_emb_base", "global_rope_theta"])
def test_the_base_has_several_names(name: str) -> None:
    others = {key: value for key, value in WRITTEN.items() if key != "rope_theta"}
    assert ModelConfig.of(others | {name: 700.0}).ropes()[""].base == 700.0


@pytest.mark.parametrize("beside", [None, 512])
@pytest.mark.parametrize("inside", [None, 256])
def test_a_trained_length_beside_the_parameters_is_read_first(
    beside: int | None, inside: int | None
) -> None:
    """As transformers does, which writes it over that of the parameters."""
    scaling = {"rope_type": "yarn", "factor": 4.0} | ({TRAINED: inside} if inside else {})
    fields = WRITTEN | {"rope_scaling": scaling} | ({TRAINED: beside} if beside else {})
    assert ModelConfig.of(fields).ropes()[""].length == (beside or inside or 2048)
