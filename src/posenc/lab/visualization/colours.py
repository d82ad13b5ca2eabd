"""Colours of amounts and angles in maps, and maps as PNG images."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from io import BytesIO

import altair as alt
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

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
    numbers = values[~values.isnan()]
    low, high = (numbers.amin().item(), numbers.amax().item()) if numbers.numel() else (0.0, 0.0)
    return low > NARROW * high > 0 and high - low > 1e-3 * high


@dataclass(frozen=True)
class Scale:
    """Colour scale of values.

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
            numbers = maps[~maps.isnan()]
            return cls((numbers.amin().item(), numbers.amax().item()), 1.0)
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
        """The scale as Vega-Lite's gradient."""
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


PIXELS = 576
"""Pixels a side, roughly: cells have whole ones."""


def data_uri(colours: Float[Tensor, "R K 4"]) -> str:
    """A PNG as a ``data:`` address: each cell in its red, green, blue and opacity, from 0 to 1."""
    rows, columns, _ = colours.shape
    down, across = (max(1, round(PIXELS / count)) for count in (rows, columns))
    levels = (colours.clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(levels.numpy())
    content = BytesIO()
    blocks = image.resize((columns * across, rows * down), Image.Resampling.NEAREST)
    blocks.save(content, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
