"""Series in charts are told apart by readers of all kinds, on light and dark paper."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from posenc.lab.reporting.palette import COLOURS, CONTROL, DARK, LIGHT, SERIES, SHAPES
from posenc.lab.visualization.pictures import FALL, RISE

Colour = np.ndarray

# What dichromats see, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN = {
    "all colours": np.eye(3),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
}  # fmt: skip
XYZ = np.array([
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str) -> Colour:
    levels = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def cielab(rgb: Colour) -> Colour:
    share = XYZ @ rgb / WHITE
    f = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(first: Colour, second: Colour) -> float:
    """Sharma, Wu and Dalal 2005, equations 2 to 22."""
    lightness = (first[0] + second[0]) / 2
    chromas = [np.hypot(*lab[1:]) for lab in (first, second)]
    stretch = 1.5 - 0.5 * np.sqrt(np.mean(chromas) ** 7 / (np.mean(chromas) ** 7 + 25**7))
    (a1, b1), (a2, b2) = ((lab[1] * stretch, lab[2]) for lab in (first, second))
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180
    hue = (h1 + turn / 2) % 360
    chroma = (c1 + c2) / 2
    terms = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(by * np.cos(np.radians(n * hue + shift)) for by, n, shift in terms)
    by_lightness = (
        1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2),
        1 + 0.045 * chroma,
        1 + 0.015 * chroma * t,
    )
    steps = (second[0] - first[0], c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)))
    dl, dc, dh = (step / by for step, by in zip(steps, by_lightness, strict=True))
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7))
    rotation *= np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh))


def test_the_difference_is_that_of_the_paper() -> None:
    """Pairs 1, 7 and 17 of table 1 in Sharma, Wu and Dalal."""
    for first, second, expected in (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ):
        assert ciede2000(np.array(first), np.array(second)) == pytest.approx(expected, abs=1e-4)


PAPERS = {"light": LIGHT, "dark": DARK}


def contrast(first: str, second: str) -> float:
    """By WCAG 2.2."""
    low, high = sorted(XYZ[1] @ linear(colour) + 0.05 for colour in (first, second))
    return float(high / low)


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_any_two_colours_are_told_apart(seen: Colour, paper: dict[str, str]) -> None:
    colours = [paper[name] for name in (*SERIES, CONTROL)]
    labs = {c: cielab(np.clip(seen @ linear(c), 0, 1)) for c in colours}
    apart = {pair: ciede2000(labs[pair[0]], labs[pair[1]]) for pair in combinations(labs, 2)}
    assert min(apart.values()) > 11, min(apart, key=apart.__getitem__)


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
@pytest.mark.parametrize("ground", ["--paper", "--tint", "--shade"])
def test_words_can_be_read(paper: dict[str, str], ground: str) -> None:
    for name in ("--ink", "--soft", "--good", "--fair", "--bad"):
        assert contrast(paper[name], paper[ground]) >= 4.5, name


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
@pytest.mark.parametrize("ground", ["--paper", "--shade"])
def test_lines_stand_out_from_the_paper(paper: dict[str, str], ground: str) -> None:
    for name in (*SERIES, CONTROL, "--edge"):
        assert contrast(paper[name], paper[ground]) >= 3, name


def test_what_keeps_its_colour_stands_out_from_both_papers() -> None:
    """Lines of pictures, and points from the first colour to the second, in light and dark."""
    first, second = (np.frombuffer(bytes.fromhex(c[1:]), np.uint8) for c in COLOURS[:2])
    between = [first + share * (second.astype(int) - first) for share in np.linspace(0, 1, 9)]
    points = ["#" + bytes(point.round().astype(np.uint8)).hex() for point in between]
    for paper in PAPERS.values():
        for colour in (RISE, FALL, *points):
            assert contrast(colour, paper["--paper"]) >= 3, colour


def test_both_papers_have_the_same_names() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert [LIGHT[name] for name in SERIES] == list(COLOURS)


def test_colour_and_mark_differ_for_forty_series() -> None:
    pairs = {(COLOURS[n % len(COLOURS)], SHAPES[n % len(SHAPES)]) for n in range(40)}
    assert len(pairs) == 40
