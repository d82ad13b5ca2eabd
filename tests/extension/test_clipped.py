"""Clipped RoPE against the taper of its paper."""

from __future__ import annotations

import json
import math

import pytest
import torch

from posenc import Grid, Layout, create
from posenc.encodings.query_key.rope import Rope
from posenc.extension import NotApplicable, extend
from posenc.transformers.checkpoints import parameters_of


def rope(encoding: object) -> Rope:
    part = getattr(encoding, "query_key", None)
    assert isinstance(part, Rope)
    return part


def test_by_hand() -> None:
    """Four pairs, of which three are slowed: φ = 0, π/2 and π leave 1, a half and nothing."""
    part = rope(extend(create("rope", head_dim=8, base=16), "clipped", share=0.75))
    frequencies = part.frequencies(like=torch.zeros(()))
    assert frequencies.tolist() == pytest.approx([1.0, 0.5, 0.125, 0.0])


def test_equals_the_authors_taper() -> None:
    """Heads of 128: a half plus half a cosine, evenly from 0 to π over the last 20 pairs."""
    plain = rope(create("rope", head_dim=128, base=500000.0))
    part = rope(extend(create("rope", head_dim=128, base=500000.0), "clipped"))
    like = torch.zeros((), dtype=torch.float64)
    taper = torch.ones(64, dtype=torch.float64)
    taper[44:] = 0.5 * (1 + torch.linspace(0, math.pi, 20, dtype=torch.float64).cos())
    expected = plain.frequencies(like=like) * taper
    torch.testing.assert_close(part.frequencies(like=like), expected, rtol=1e-12, atol=1e-18)


def test_the_last_pair_stays_as_it_is() -> None:
    part = extend(create("rope", head_dim=8), "clipped").query_key
    q = torch.randn(1, 1, 3, 8)
    rotated, _ = part(q, q, Grid.of(Layout.at(torch.tensor([0.0, 1e6, 2.0**23]))))
    assert torch.equal(rotated[..., [3, 7]], q[..., [3, 7]])
    assert not torch.allclose(rotated[..., [0, 4]], q[..., [0, 4]])


def test_after_a_method_that_divides() -> None:
    both = rope(extend(create("rope", head_dim=12), "yarn+clipped", factor=4, length=64))
    yarn = rope(extend(create("rope", head_dim=12), "yarn", factor=4, length=64))
    assert both.gain == yarn.gain != 1
    assert both.divisors is not None
    assert yarn.divisors is not None
    assert both.divisors[:4] == yarn.divisors[:4]
    assert both.divisors[4:] == (yarn.divisors[4], math.inf)


@pytest.mark.parametrize("width", [4, 16])
def test_checkpoints_hold_finite_factors(width: int) -> None:
    """Two pairs too, whose divisors are those of an NTK of infinite base."""
    parameters = parameters_of(extend(create("rope", head_dim=width), "clipped"), 4096)
    assert json.loads(json.dumps(parameters, allow_nan=False))["rope_type"] == "longrope"
    slowest = torch.tensor(parameters["long_factor"][-1], dtype=torch.float32).reciprocal()
    assert slowest.item() * 2**40 < 1e-12


def test_encodings_without_rope_are_refused() -> None:
    with pytest.raises(NotApplicable, match="rope"):
        extend(create("alibi", heads=4), "clipped")
