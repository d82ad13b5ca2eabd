"""The shapes that decoders from elsewhere have: parallel blocks, biases and windows of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError, UnknownNameError
from posenc.models import Decoder, DecoderConfig


def make(**fields: Any) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(**{"vocabulary": 19, "dim": 16, "layers": 3, "heads": 2} | fields)
    return Decoder(config).eval()


TOKENS = torch.arange(12).unsqueeze(0)

VARIANTS: list[dict[str, Any]] = [
    {"parallel": True},
    {"embedding_norm": True, "norm": "layer", "encoding": "alibi"},
    {"attention_bias": "inputs"},
    {"attention_bias": "none", "bias": True},
    {"activation": "geglu"},
    {"activation": "gelu_tanh"},
    {"window": [None, 3, 4]},
    {"embedding_scale": 1.0},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@torch.no_grad()
def test_saved_loaded_and_cached(fields: dict[str, Any], tmp_path: Path) -> None:
    model = make(**fields)
    model.save(tmp_path)
    again, expected = Decoder.load(tmp_path), model(TOKENS)
    cache = again.new_cache()
    parts = [again(part, cache=cache) for part in TOKENS.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("biases", "expected"),
    [("all", {"query", "key", "value", "output"}), ("inputs", {"query", "key", "value"})],
)
def test_which_projections_have_biases(biases: str, expected: set[str]) -> None:
    names = dict(make(attention_bias=biases).blocks[0].named_parameters())
    found = {name.split(".")[1] for name in names if name.endswith("bias")}
    assert found == expected
    assert "feed_forward.output.bias" not in names


def test_parallel_layers_do_not_read_each_other() -> None:
    block = make(parallel=True, layers=1).blocks[0]
    x = torch.randn(1, 4, 16)
    layout = make().new_cache()[0].following(4)
    attended = block.attention(block.attention_norm(x), layout)
    fed = block.feed_forward(block.feed_forward_norm(x))
    torch.testing.assert_close(block(x, layout), x + attended + fed)


def test_windows_of_layers() -> None:
    windows = [block.attention.window for block in make(window=[None, 3, 4]).blocks]
    assert windows == [None, 3, 4]
    with pytest.raises(ArgumentError, match="3, one per layer, got 2"):
        make(window=[1, 2])


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="parallel"):
        make(parallel=True, norm_first=False)
    with pytest.raises(UnknownNameError, match="inputs"):
        make(attention_bias="input")
