"""A stretched model decodes token by token, across the trained length, as in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import create_layers
from posenc.extension import EXTENSIONS, extend_layers
from posenc.models import Decoder, DecoderConfig

L, TOKENS = 16, 24
ENCODINGS = ("learned", "radix", "rope", "sinusoidal")
PAIRS = sorted(
    (name, on)
    for name, method in EXTENSIONS.items()
    for on in ENCODINGS
    if method.level == "encoding" and {on, "any"} & set(method.on)
    if (name, on) not in {("direct", "learned"), ("log_n", "learned")}  # these end at L
)


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
def test_decoding_is_as_claimed(method: str, on: str) -> None:
    decoder = model(method, on)
    whole = outputs(decoder, [TOKENS])
    tokenwise, chunked = outputs(decoder, [1] * TOKENS), outputs(decoder, [7, 11, 6])
    if EXTENSIONS[method].claims.decodes_as_whole:
        torch.testing.assert_close(tokenwise, whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)
    else:
        assert not torch.allclose(tokenwise[:, L:], whole[:, L:], atol=1e-3)


@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope"])
def test_up_to_the_trained_length_all_decode_alike(method: str) -> None:
    decoder = model(method, "rope")
    tokens = torch.randint(50, (2, L), generator=torch.Generator().manual_seed(1))
    cache = decoder.new_cache()
    with torch.no_grad():
        parts = [decoder(part, cache=cache) for part in tokens.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), decoder(tokens), rtol=1e-4, atol=1e-4)
