"""Methods on one axis of video, and RIFLEx, by hand and against released models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posenc import Encoding, Grid, Layout, create
from posenc.encodings.query_key.axial_rope import PRESETS, AxialRope
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension import NotApplicable, extend


def divisors(encoding: Encoding) -> list[float]:
    part = encoding.query_key
    assert isinstance(part, Rope | AxialRope)
    return list(part.divisors or ())


def test_riflex_by_hand() -> None:
    """HunyuanVideo: k = 4, period 50; 66 latent frames get 2π · 0.9 / 66 radians a frame."""
    video = create("axial_rope", head_dim=128, **PRESETS["hunyuan_video"])
    longer = extend(video, "on_axis", method="riflex", axis=0, factor=2, length=33)
    expected = [1.0] * 64
    expected[3] = 256 ** (-3 / 8) / (0.9 * 2 * math.pi / 66)
    assert divisors(longer) == pytest.approx(expected)
    named = extend(video, "on_axis", method="riflex@repeats=48", axis=0, factor=2, length=33)
    assert divisors(named) == divisors(longer)


@pytest.mark.parametrize(
    ("base", "width", "trained", "pair"), [(256, 16, 33, 3), (10000, 16, 13, 1)]
)
def test_riflex_chooses_the_pair_of_the_authors(
    base: float, width: int, trained: float, pair: int
) -> None:
    """HunyuanVideo's fourth and CogVideoX's second."""
    time = create("rope", head_dim=width, base=base)
    changed = divisors(extend(time, "riflex", factor=2, length=trained))
    assert [t for t, divisor in enumerate(changed) if divisor != 1] == [pair]


def test_riflex_never_makes_a_pair_faster() -> None:
    slow = extend(create("rope", head_dim=16), "riflex", factor=1.01, length=30, repeats=60000.0)
    assert set(divisors(slow)) == {1.0}


def test_riflex_needs_a_pair_that_is_slow_enough() -> None:
    with pytest.raises(ArgumentError, match="length"):
        extend(create("rope", head_dim=4, base=2), "riflex", factor=2, length=50)


def test_ntk_on_time_is_cosmos() -> None:
    """The preset's base is that of NTK at twice the frames."""
    plain = create("axial_rope", head_dim=128, pairing="half")
    stretched = extend(plain, "on_axis", method="ntk", axis=0, factor=2)
    layout = Layout.cells(9, 3, 4)
    theirs = create("axial_rope", head_dim=128, **PRESETS["cosmos"])
    torch.testing.assert_close(stretched.cos_sin(layout), theirs.cos_sin(layout))


@pytest.mark.parametrize(
    ("method", "factors"), [("ntk", {"ntk_factor": 2.5}), ("interpolate", {"linear_factor": 2.5})]
)
def test_both_axes_of_lumina(method: str, factors: dict[str, float]) -> None:
    """Its NTK multiplies the base by s alone, so that the slowest pair is not s times slower."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    theirs = embeddings.get_2d_rotary_pos_embed_lumina(48, 5, 7, **factors).flatten(0, 1)
    longer = create("axial_rope", head_dim=48, pairs=(12, 12))
    factor = 2.5 ** (22 / 24) if method == "ntk" else 2.5
    for axis in range(2):
        longer = extend(longer, "on_axis", method=method, factor=factor, axis=axis)
    cosine, sine = (x[0, :, ::2] for x in longer.cos_sin(Layout.cells(5, 7)))
    alternating = theirs.view(35, 12, 2).transpose(1, 2).flatten(1)  # of h, w, h, w, …
    got = torch.complex(cosine, sine)
    torch.testing.assert_close(got, alternating, atol=1e-5, rtol=0)


def test_axes_are_stretched_one_after_the_other() -> None:
    image = create("axial_rope", head_dim=24, pairs=(6, 6), base=(100.0, 1000.0))
    once = extend(image, "on_axis", method="yarn@alpha=0.1@beta=2", factor=2, length=32, axis=1)
    both = extend(once, "on_axis", method="yarn@alpha=0.1@beta=2", factor=4, length=32, axis=0)
    assert divisors(once)[:6] == [1.0] * 6
    assert divisors(both)[6:] == divisors(once)[6:]
    for axis, (base, factor) in enumerate(((100.0, 4), (1000.0, 2))):
        rope = create("rope", head_dim=12, base=base)
        alone = extend(rope, "yarn", factor=factor, length=32, alpha=0.1, beta=2)
        assert divisors(both)[6 * axis : 6 * axis + 6] == divisors(alone)
    gain = both.query_key.gain  # type: ignore[union-attr]
    assert gain == pytest.approx((0.1 * math.log(4) + 1) * (0.1 * math.log(2) + 1))
    with pytest.raises(NotApplicable):
        extend(both, "on_axis", method="ntk", factor=2, axis=0)


def test_lengths_are_in_cells_whatever_the_step() -> None:
    """A step of 1/2 halves the turns in as many cells."""
    fine = create("axial_rope", head_dim=16, pairs=(8,), step=0.5)
    rope = create("rope", head_dim=16)
    got = extend(fine, "on_axis", method="ntk_by_parts@alpha=0.1@beta=2", factor=2, length=40)
    expected = extend(rope, "ntk_by_parts", alpha=0.1, beta=2, factor=2, length=20)
    assert divisors(got) == divisors(expected)
    for tokens, pair in ((12, 0), (24, 0), (40, 1)):  # periods of 4π and 12.6π tokens
        method = f"riflex@repeats={tokens}"
        own = divisors(extend(fine, "on_axis", method=method, factor=2, length=40))
        assert [t for t in range(8) if own[t] != 1] == [pair]


def test_a_band_is_taken_from_its_fastest_pair_on() -> None:
    """LTX-Video's rises: pair t of rope is pair d - 1 - t, and tokens turn it by its frequency."""
    rising = create("axial_rope", head_dim=24, pairs=(6, 6), band=(0.05, 2.0))
    falling = create("axial_rope", head_dim=24, pairs=(6, 6), band=(2.0, 0.05))
    theta = [2 * 40 ** (-t / 5) for t in range(6)]
    rope = create("rope", head_dim=12, base=40 ** (6 / 5))
    for method in ("ntk", "interpolate", "yarn@alpha=0.5@beta=4", "riflex"):
        same = [
            extend(band, "on_axis", method=method, factor=2, length=30, axis=1)
            for band in (rising, falling)
        ]
        assert divisors(same[0])[6:] == pytest.approx(divisors(same[1])[:5:-1])
        assert divisors(same[0])[:6] == [1.0] * 6
        expected = divisors(extend(rope, method, factor=2, length=60))
        assert divisors(same[1])[6:] == pytest.approx(expected)
    outgrown = next(t for t in range(6) if 30 * theta[t] / (2 * math.pi) <= 0.9)
    expected = [1.0] * 6
    expected[outgrown] = max(1.0, theta[outgrown] * 60 / (1.8 * math.pi))
    assert divisors(same[1])[6:] == pytest.approx(expected)


def test_learned_frequencies_are_interpolated() -> None:
    mochi = create(
        "axial_rope", head_dim=12, heads=2, pairs=(2, 2, 2), step=(1.0, 4.0, 4.0), learned=True
    )
    with torch.no_grad():
        mochi.query_key.frequencies.normal_()  # type: ignore[union-attr]
    longer = extend(mochi, "on_axis", method="interpolate", factor=2, axis=1)
    before, after = mochi.cos_sin(Layout.cells(2, 3, 2)), longer.cos_sin(Layout.cells(2, 6, 2))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.unflatten(2, (2, 6, 2))[:, :, :, ::2].flatten(2, 4), old)


@pytest.mark.parametrize(
    ("options", "changes", "argument"),
    [
        ({}, {"axis": 2}, "axis"),
        ({"pairs": (0, 8)}, {"axis": 0}, "axis"),
        ({}, {"method": "rerope", "length": 30}, "method"),
        ({}, {"method": "log_n", "length": 30}, "method"),
        ({"band": (1.0, 2.0), "spacing": "linear"}, {}, "encoding"),
        ({"learned": True, "heads": 2}, {}, "encoding"),
    ],
)
def test_what_is_not_stretched_is_named(
    options: dict[str, Any], changes: dict[str, Any], argument: str
) -> None:
    video = create("axial_rope", head_dim=16, **{"pairs": (4, 4), **options})
    with pytest.raises(ArgumentError) as refused:
        extend(video, "on_axis", **{"method": "ntk", "factor": 2, **changes})
    assert refused.value.argument == argument


def test_other_axes_are_rotated_as_before() -> None:
    video, grid = create("axial_rope", head_dim=18), Grid.of(Layout.cells(5, 2, 3))
    longer = extend(video, "on_axis", method="interpolate", axis=1, factor=2)
    q = torch.randn(1, 2, 30, 18)
    before, after = (x.query_key(q, q, grid)[0] for x in (video, longer))  # type: ignore[misc]
    assert torch.equal(
        before[..., [*range(6), *range(12, 18)]], after[..., [*range(6), *range(12, 18)]]
    )
    assert not torch.allclose(before[..., 6:12], after[..., 6:12])
