"""Axial RoPE against loops from the formulas of released models, on one to four axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from posenc import Encoding, Grid, Layout, attend, create
from posenc.encodings.query_key.axial_rope import ENTRY, PRESETS, AxialRope
from posenc.encodings.query_key.mrope import Mrope
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.query_key.rope2d import Rope2d
from posenc.encodings.query_key.rope_mixed import RopeMixed
from posenc.errors import ArgumentError
from posenc.testing import LAWS, Subject
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import inputs
from tests.encodings.image_grids import rotate_axes_by_loops
from tests.testing.test_laws import OF_PROGRAMS

Angle = Callable[[int, int, list[float]], float]

VIDEO = Layout.cells(2, 2, 3)
CELLS = {
    "wan": VIDEO,
    "hunyuan_video": VIDEO,
    "cogvideox": VIDEO,
    "flux": VIDEO,
    "lumina2": VIDEO,
    "qwen_image": Layout.cells(2, 3, 4, coordinates=("indices", "centred", "centred")),
    "ltx_video": VIDEO,
    "mochi": Layout.cells(2, 2, 2, coordinates=("indices", "midpoints", "midpoints")),
    "cosmos": VIDEO,
    "timm": Layout.cells(3, 4, coordinates="ends", prefix=1),
    "dinov3": Layout.cells(3, 4, coordinates="midpoints", prefix=1),
    "rotary_embedding_torch": Layout.cells(3, 4, coordinates="ends"),
}
"""Positions of a small input of each model."""

WIDTH = {
    "lumina2": 96,
    "cogvideox": 64,
    "ltx_video": 16,
    "timm": 16,
    "dinov3": 16,
    "rotary_embedding_torch": 16,
}
"""Features of a head; 128 in all others."""

HEADS = 2


def falling(bounds: Mapping[int, int], base: float) -> Angle:
    """Axes one after the other: pairs up to the bound of each, each axis falling from 1."""

    def angle(head: int, pair: int, at: list[float]) -> float:
        first = 0
        for axis, bound in bounds.items():
            if pair < bound:
                return at[axis] * base ** (-(pair - first) / (bound - first))
            first = bound
        return 0.0

    return angle


def cosmos(head: int, pair: int, at: list[float]) -> float:
    """Time at twice the trained length by NTK: 22 pairs, the base times 2^(44 / 42)."""
    if pair < 22:
        return at[0] * (10000 * 2 ** (44 / 42)) ** (-2 * pair / 44)
    axis, step = divmod(pair - 22, 21)
    return at[1 + axis] * 10000.0 ** (-2 * step / 42)


def ltx(head: int, pair: int, at: list[float]) -> float:
    """Sixteen pairs of both heads: the first does not turn, then five a turn of the three axes."""
    pair += 8 * head
    if pair == 0:
        return 0.0
    step, axis = divmod(pair - 1, 3)
    seconds, row, column = at[0] * 8 / 25, at[1] * 32, at[2] * 32
    share = (seconds / 20, row / 2048, column / 2048)[axis]
    return math.pi / 2 * 10000 ** (step / 4) * (2 * share - 1)


def timm(head: int, pair: int, at: list[float]) -> float:
    """Four pairs an axis, evenly on a log scale from π to 112 π."""
    axis, step = divmod(pair, 4)
    return at[axis] * math.pi * 2 ** (step / 3 * (math.log2(224) - 1))


def pixels(head: int, pair: int, at: list[float]) -> float:
    """Four pairs an axis, evenly from π to 5 π."""
    axis, step = divmod(pair, 4)
    return at[axis] * math.pi * (1 + 4 * step / 3)


def dinov3(head: int, pair: int, at: list[float]) -> float:
    axis, step = divmod(pair, 4)
    return 2 * math.pi * at[axis] / 100 ** (step / 4)


ANGLES: Mapping[str, Angle] = {
    "wan": falling({0: 22, 1: 43, 2: 64}, 10000.0),
    "hunyuan_video": falling({0: 8, 1: 36, 2: 64}, 256.0),
    "cogvideox": falling({0: 8, 1: 20, 2: 32}, 10000.0),
    "flux": falling({0: 8, 1: 36, 2: 64}, 10000.0),
    "qwen_image": falling({0: 8, 1: 36, 2: 64}, 10000.0),
    "lumina2": falling({0: 16, 1: 32, 2: 48}, 10000.0),
    "ltx_video": ltx,
    "cosmos": cosmos,
    "timm": timm,
    "dinov3": dinov3,
    "rotary_embedding_torch": pixels,
}


def made(name: str) -> AxialRope:
    """The preset, with as many heads as it needs."""
    options = PRESETS[name]
    needs_heads = options.keys() & {"across_heads", "learned"}
    return AxialRope(head_dim=WIDTH.get(name, 128), heads=HEADS if needs_heads else None, **options)


@pytest.mark.parametrize("name", ANGLES)
def test_presets_equal_loops(name: str) -> None:
    rope, grid = made(name), Grid.of(CELLS[name])
    q, k, v = inputs(grid, heads=HEADS, width=rope.head_dim)
    k = k.repeat_interleave(HEADS // k.shape[1], 1)  # its own rotation a head, across heads
    v = v.repeat_interleave(HEADS // v.shape[1], 1)
    how = {"adjacent": rope.pairing == "adjacent"}
    exact = grid.in_precision_of(q)
    turned = [rotate_axes_by_loops(x, exact.query, ANGLES[name], **how) for x in (q, k)]
    torch.testing.assert_close(rope(q, k, grid), tuple(turned), atol=1e-9, rtol=0)
    got = attend(q, k, v, grid, Encoding(query_key=rope))
    torch.testing.assert_close(got, attention_by_loops(*turned, v, grid), atol=1e-9, rtol=0)


def test_every_preset_has_an_oracle() -> None:
    assert {*ANGLES, "mochi"} == {*PRESETS} == {*CELLS}


def test_mochi_adds_the_angles_of_learned_frequencies() -> None:
    rope = made("mochi")
    assert rope.frequencies is not None
    with torch.no_grad():
        rope.frequencies.normal_()
    rows = rope.frequencies.tolist()

    def angle(head: int, pair: int, at: list[float]) -> float:
        by_axis = zip((at[0], 96 * at[1], 96 * at[2]), rows, strict=True)
        return sum(place * row[head][pair] for place, row in by_axis)

    layout = CELLS["mochi"]
    q = torch.randn(1, HEADS, layout.length, 128, dtype=torch.float64)
    turned = rotate_axes_by_loops(q, layout, angle, adjacent=True)
    got, _ = rope(q, q, Grid.of(layout))
    torch.testing.assert_close(got, turned, atol=1e-9, rtol=0)
    got.sin().sum().backward()
    assert rope.frequencies.grad is not None
    assert bool((rope.frequencies.grad != 0).all())


def test_learned_frequencies_begin_as_the_ladders_of_the_axes() -> None:
    """And layers share them, as Mochi's do."""
    options = {"head_dim": 16, "heads": HEADS, "pairs": (2, 3, 1), "base": (10.0, 100.0, 1000.0)}
    plain, learned = AxialRope(**options), AxialRope(**options, learned=True)
    q, grid = torch.randn(1, HEADS, VIDEO.length, 16), Grid.of(VIDEO)
    torch.testing.assert_close(learned(q, q, grid), plain(q, q, grid))
    assert [learned.frequencies[1, 0, t].item() != 0 for t in range(6)] == [  # type: ignore[index]
        t in (2, 3, 4) for t in range(6)
    ]


def test_a_cell_by_hand() -> None:
    # Two pairs of time at 1 and 1/10 radians a frame, one pair of height, and two features that do
    # not turn. At frame π, row 1/2: (1, 0) → (-1, 0); (1, 0) → (cos π/10, sin π/10), and of the
    # row, whose step is π, (1, 0) → (cos π/2, sin π/2) = (0, 1).
    rope = AxialRope(head_dim=8, pairs=(2, 1), base=(100.0, 100.0), step=(1.0, math.pi))
    x = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 5.0, 7.0]).view(1, 1, 1, 8)
    turned, _ = rope(x, x, Grid.of(Layout.at(torch.tensor([[[math.pi, 0.5]]]))))
    expected = torch.tensor([-1.0, 0.0, 0.9510565, 0.3090170, 0.0, 1.0, 5.0, 7.0])
    torch.testing.assert_close(turned.flatten(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_an_axis_is_rope_of_its_own_pairs(axes: int) -> None:
    """Fractions, negative and far positions; what is left over goes to the first axis."""
    times = torch.randn(2, 5, axes, dtype=torch.float64) * 40 + 7 * torch.arange(axes)
    layout, each = Layout.at(times), 9 // axes
    x = torch.randn(2, 3, 5, 18, dtype=torch.float64)
    turned, _ = AxialRope(head_dim=18)(x, x, Grid.of(layout))
    first = 0
    for axis in range(axes):
        count = each + (9 % axes if axis == 0 else 0)
        alone = Rope(head_dim=2 * count, pairing="adjacent")
        part = x[..., 2 * first : 2 * (first + count)]
        expected, _ = alone(part, part, Grid.of(Layout.at(times[..., axis])))
        got = turned[..., 2 * first : 2 * (first + count)]
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
        first += count


def test_relatives_are_presets() -> None:
    """RoPE on two axes, and M-RoPE of one axis alone; mixed frequencies where they are axial."""
    image, x = Grid.of(Layout.image(3, 5, prefix=1)), torch.randn(1, HEADS, 16, 16)
    axial = AxialRope(head_dim=16, base=100.0, pairing="half")
    assert torch.equal(axial(x, x, image)[0], Rope2d(head_dim=16)(x, x, image)[0])
    words = Grid.of(Layout.at(torch.arange(16.0).view(1, -1, 1).expand(1, -1, 3)))
    rope = AxialRope(head_dim=16, pairs=(8, 0, 0), base=1e6, pairing="half")
    torch.testing.assert_close(rope(x, x, words), Mrope(head_dim=16)(x, x, words))
    mixed = RopeMixed(heads=HEADS, head_dim=16, pairing="adjacent")
    learned = AxialRope(head_dim=16, heads=HEADS, pairs=(4, 4), learned=True)
    with torch.no_grad():
        mixed.frequencies.copy_(learned.frequencies)
    torch.testing.assert_close(learned(x, x, image), mixed(x, x, image))


def test_frequencies_across_heads_differ_by_head() -> None:
    """LTX-Video: a layer's last head turns ten thousand times as fast as its first, not as fast."""
    rope = made("ltx_video")
    angles = rope.angles(Layout.at(torch.zeros(1, 1, 3, dtype=torch.float64)))
    assert angles.shape == (1, HEADS, 1, 8)
    # All coordinates are -1: the angle is -π/2 · 10^step.
    expected = [0.0, *(-math.pi / 2 * 10.0**step for step in range(5) for _ in range(3))]
    turned = torch.tensor(expected, dtype=torch.float64)
    difference = (angles.flatten() - turned) / (2 * math.pi)
    torch.testing.assert_close(difference, difference.round(), atol=1e-9, rtol=0)


VARIANTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "two axes": (2, {"pairing": "half"}),
    "three axes, a remainder": (3, {"pairs": (1, 0, 2), "step": 0.5, "origin": (1.0, 2.0, -3.0)}),
    "four axes": (4, {}),
    "across heads": (3, {"across_heads": True, "band": (0.1, 2.0)}),
    "learned": (3, {"learned": True, "pairs": (1, 2, 1)}),
    "divided": (2, {"pairs": (2, 2), "divisors": (1.0, 3.0, 1.0, 2.0), "gain": 1.2}),
}


OWN_PROGRAM = ("across heads", "learned")
"""Variants whose programs are not made as those of one axis, which the suite tries."""


def cases() -> list[object]:
    """Laws of every variant; programs made as another's are exhaustive."""
    return [
        pytest.param(
            law,
            variant,
            marks=[pytest.mark.exhaustive] * (law in OF_PROGRAMS and variant not in OWN_PROGRAM),
        )
        for variant in VARIANTS
        for law in LAWS
    ]


@pytest.mark.parametrize(("law", "variant"), cases())
def test_laws_hold_on_several_axes(law: str, variant: str) -> None:
    axes, options = VARIANTS[variant]
    trainable = bool(options.get("learned"))
    claims = replace(ENTRY.claims, axes=(axes,), trainable=trainable)
    of_one = Subject.of_entry("axial_rope", ENTRY, **options)
    LAWS[law](Subject(variant, of_one.make, claims, of_one.make_layers))


def test_a_head_has_a_pair_for_each_axis() -> None:
    q = torch.randn(1, 1, 6, 2)
    with pytest.raises(ArgumentError, match="head_dim"):
        attend(q, q, q, Grid.of(Layout.image(2, 3)), create("axial_rope", head_dim=2))
