"""Stretched models of which each token sees the past at the length of its own call.

All others decode across the trained length as in one pass, by the laws of ``test_laws.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import create_layers
from posenc.extension import EXTENSIONS, extend_layers
from posenc.models import Decoder, DecoderConfig

L, TOKENS = 16, 24
PAIRS = [
    (name, on)
    for name, method in EXTENSIONS.items()
    for on in ("learned", "radix", "rope", "sinusoidal")
    if method.level == "encoding" and {on, "any"} & set(method.on)
    if not method.claims.decodes_as_whole
]


def model(method: str, on: str) -> Decoder:
    torch.manual_seed(0)
    options: dict[str, Any] = {"base": 5, "digits": 2} if on == "radix" else {}
    context = {"dim": 32, "heads": 2, "max_length": L, "causal": True}
    original = create_layers(on, layers=2, **context, **options)
    stretched = extend_layers(original, method, factor=1.5, length=L)
    config = DecoderConfig(vocabulary=50, dim=32, layers=2, heads=2)
    return Decoder(config, encodings=stretched).eval()


def outputs(decoder: Decoder, sizes: list[int]) -> Tensor:
    tokens = torch.randint(50, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    cache = decoder.new_cache()
    with torch.no_grad():
        parts = [decoder(part, cache=cache) for part in tokens.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("method", "on"), PAIRS)
def test_one_pass_is_another_text(method: str, on: str) -> None:
    decoder = model(method, on)
    whole, tokenwise = outputs(decoder, [TOKENS]), outputs(decoder, [1] * TOKENS)
    assert not torch.allclose(tokenwise[:, L:], whole[:, L:], atol=1e-3)


@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope"])
def test_up_to_the_trained_length_all_decode_alike(method: str) -> None:
    decoder = model(method, "rope")
    tokens = torch.randint(50, (2, L), generator=torch.Generator().manual_seed(1))
    cache = decoder.new_cache()
    with torch.no_grad():
        parts = [decoder(part, cache=cache) for part in tokens.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), decoder(tokens), rtol=1e-4, atol=1e-4)
