"""Colours of words, series, amounts and angles, on white and on near-black paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

COLOURS = (
    *("#0a65f5", "#e46107", "#075343", "#fc0b8c", "#ab1300"),
    *("#0696b6", "#bb5f52", "#011ed9", "#b30455", "#7f0577"),
)
DARK_COLOURS = (
    *("#8492ff", "#f09308", "#1cead0", "#d13978", "#ed0617"),
    *("#01d6ef", "#ffad8e", "#7858fc", "#f94a70", "#d80fae"),
)
"""Of series on light and on dark paper, the same hues. At least 11 apart (CIEDE2000) from one
another and from the control's, for readers with deuteranopia or protanopia too."""

SERIES = tuple(f"--series-{number}" for number in range(len(COLOURS)))
CONTROL = "--control"
"""Names of these colours, and of controls', in charts that follow the paper."""

LIGHT = {"--paper": "#ffffff", "--ink": "#1c2126", "--soft": "#5b6570", "--edge": "#858d96"}
LIGHT |= {"--line": "#e3e6ea", "--tint": "#f5f7f9", "--shade": "#f3f6f9"}
LIGHT |= {"--good": "#1d7a4f", "--fair": "#8a5c06", "--bad": "#b3323e"}
LIGHT |= {CONTROL: "#747c84", **dict(zip(SERIES, COLOURS, strict=True))}

DARK = {"--paper": "#14171a", "--ink": "#e6e9ec", "--soft": "#9ba5af", "--edge": "#6d7781"}
DARK |= {"--line": "#2c3238", "--tint": "#1c2126", "--shade": "#1b1f24"}
DARK |= {"--good": "#5cc492", "--fair": "#dca84a", "--bad": "#f0808a"}
DARK |= {CONTROL: "#8f98a1", **dict(zip(SERIES, DARK_COLOURS, strict=True))}
"""Colours by name on light and on dark paper: of words (``ink``, ``soft``), edges of axes, lines
that only guide the eye, backgrounds (``tint``, ``shade``), verdicts and series."""

SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "triangle-right",
    "triangle-left",
)
"""Marks, so that series differ without colours too."""

OUTLINES = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "square": "M-3.5,-3.5h7v7h-7z",
    "triangle-up": "M0,-4.2L4.4,3.6H-4.4z",
    "diamond": "M0,-5L4,0L0,5L-4,0z",
    "triangle-down": "M0,4.2L4.4,-3.6H-4.4z",
    "cross": "M-1.6,-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "triangle-right": "M4.2,0L-3.6,4.4V-4.4z",
    "triangle-left": "M-4.2,0L3.6,4.4V-4.4z",
}
"""The marks as paths of SVG, about ten pixels wide, around zero."""

RISE, FALL = "#2f7cc4", "#cf3f45"
"""Above zero and below it. Zero is the paper: what is less is more transparent."""

UNEVEN = 8.0
"""Maps whose largest values are so many times apart are coloured by a root of the value."""

NARROW = 0.5
"""Values that are all above so much of the largest are coloured from the least of them on."""

NOTHING = (0.45, 0.5, 0.57, 0.14)

TURN = 24
"""Steps in which the legend goes once around the circle."""


def is_narrow(values: Tensor) -> bool:
    """True if values lie so close together, far from zero, that a scale from zero hides them."""
    seen = values[~values.isnan()]
    low, high = (seen.amin().item(), seen.amax().item()) if seen.numel() else (0.0, 0.0)
    return low > NARROW * high > 0 and high - low > 1e-3 * high


@dataclass(frozen=True)
class Scale:
    """From values to colours.

    Args:
        domain: the smallest and the largest value.
        exponent: of the share of the largest value that becomes opacity; None for angles, which
            have a hue each.
    """

    domain: tuple[float, float]
    exponent: float | None

    @classmethod
    def of_amounts(cls, maps: Float[Tensor, "N R K"]) -> Scale:
        """White at zero, blue above and red below; only the sides that there are.

        Where all values are far above zero, white at the least of them.
        """
        if is_narrow(maps):
            seen = maps[~maps.isnan()]
            return cls((seen.amin().item(), seen.amax().item()), 1.0)
        sizes = maps.abs().nan_to_num(0.0).flatten(1).amax(1)
        size = sizes.max().item() or 1.0
        uneven = len(maps) > 1 and bool(sizes.min() * UNEVEN < size)
        falls, rises = (bool((sign * maps > 1e-6 * size).any()) for sign in (-1, 1))
        low, high = -size if falls else 0.0, size if rises or not falls else 0.0
        return cls((low, high), 0.5 if uneven else 1.0)

    @classmethod
    def of_angles(cls) -> Scale:
        """A cycle of hues, so that -π and π look the same."""
        return cls((-math.pi, math.pi), None)

    def colour(self, values: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims 4"]:
        """Red, green, blue and opacity from 0 to 1; NaN is a faint grey."""
        if self.exponent is None:
            thirds = torch.tensor([0.0, 1 / 3, 2 / 3]) * math.pi
            # The "sinebow": three squared sines, a third of a turn apart; alike in lightness.
            hue = (math.pi * (0.5 - (values + math.pi) / (2 * math.pi))).unsqueeze(-1) + thirds
            coloured = torch.nn.functional.pad(hue.sin().square(), (0, 1), value=1.0)
        else:
            base = max(self.domain[0], 0.0)
            share = (values - base) / max(-self.domain[0], self.domain[1] - base)
            ends = torch.tensor([_channels(FALL), _channels(RISE)])
            opacity = share.abs().pow(self.exponent).unsqueeze(-1)
            coloured = torch.cat([ends[(share > 0).long()], opacity], dim=-1)
        return torch.where(values.isnan().unsqueeze(-1), torch.tensor(NOTHING), coloured)

    def legend(self) -> alt.Scale:
        """The same for Vega-Lite's gradient."""
        low, high = self.domain
        if self.exponent is None:
            at = torch.linspace(low, high, TURN + 1)
            colours = ["rgb({:.0f},{:.0f},{:.0f})".format(*(255 * c[:3])) for c in self.colour(at)]
            return alt.Scale(domain=at.tolist(), range=colours)
        near = 1e-9 * max(-low, high)
        stops = {low: (FALL, 1), -near: (FALL, 0)} if low < 0 else {}
        stops |= {near if low < 0 else low: (RISE, 0), high: (RISE, 1)} if high > 0 else {}
        colours = ["rgba({},{},{},{})".format(*_levels(c), a) for c, a in stops.values()]
        return alt.Scale(
            type="pow", exponent=self.exponent, domain=list(stops), range=colours, interpolate="rgb"
        )


def _levels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _channels(colour: str) -> list[float]:
    return [level / 255 for level in _levels(colour)]
