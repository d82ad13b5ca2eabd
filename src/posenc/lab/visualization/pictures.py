"""Pictures of encodings, drawn by Altair from their profiles, and the colours of their maps."""

from __future__ import annotations

import base64
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import altair as alt
import torch
import vl_convert
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from posenc.errors import ArgumentError
from posenc.lab.reporting.palette import COLOURS, LIGHT
from posenc.lab.visualization.panels import Curves, Heat, Panel, Profile, Trail
from posenc.storage import write_bytes

FORMATS = (".png", ".svg", ".html")

SIDE = 288
"""Pixels that a panel is wide and high, roughly: cells have whole ones."""

NAMED_POINTS = 8

NAME_DISTANCE = 0.09
"""Share of a trail's square that two points must be apart for both to be named."""

NOTE_WIDTH = 54
"""Characters a line of the note on a panel."""

INK, SOFT, EDGE, GRID = (LIGHT[f"--{name}"] for name in ("ink", "soft", "edge", "line"))

PARAMETERS = {
    "initial": "Drawn with the initial values of its parameters, which training changes.",
    "random": "Drawn with random values of its parameters: with the initial ones it does nothing.",
}

CONFIG: dict[str, Any] = {
    "background": "#ffffff",
    "font": "sans-serif",
    "padding": 20,
    "axis": {"gridColor": GRID, "domainColor": EDGE, "tickColor": EDGE}
    | {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal", "titleColor": SOFT}
    | {"labelColor": SOFT, "titlePadding": 8, "labelFlush": False},
    "legend": {"labelFontSize": 11, "labelColor": SOFT, "titleFontSize": 11, "titleColor": SOFT}
    | {"titleFontWeight": "normal", "symbolStrokeWidth": 2.5, "symbolType": "stroke"},
    "title": {"anchor": "start", "color": INK, "subtitleColor": SOFT, "fontSize": 14}
    | {"subtitleFontSize": 12, "subtitlePadding": 4, "offset": 10},
    "view": {"stroke": None},
    "concat": {"spacing": 44},
}


def save_picture(profile: Profile, path: Path | str, *, summary: str = "") -> None:
    """Draw a profile into a file: PNG, SVG, or an HTML page that works without a network.

    Args:
        profile: of the encoding.
        path: its ending says which; an existing file is replaced.
        summary: what the encoding does, for the line under its name.

    Raises:
        ArgumentError: on another ending.
        OutputError: when the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise ArgumentError(
            "out",
            expected=f"a file ending in {', '.join(FORMATS)}",
            got=path.name,
            remedy=f"Write {path.with_suffix('.png').name}, for example.",
        )
    spec = draw(profile, summary=summary)
    if kind == ".png":
        write_bytes(path, vl_convert.vegalite_to_png(spec, scale=2))
    elif kind == ".svg":
        write_bytes(path, vl_convert.vegalite_to_svg(spec).encode())
    else:
        write_bytes(path, vl_convert.vegalite_to_html(spec, bundle=True).encode())


def draw(profile: Profile, *, summary: str = "") -> dict[str, Any]:
    """The profile as a Vega-Lite specification with all its data."""
    lines = [summary] if summary else []
    if profile.parameters in PARAMETERS:
        lines.append(PARAMETERS[profile.parameters])
    panels = [draw_panel(panel) for panel in profile.panels]
    return {
        "$schema": alt.SCHEMA_URL,
        "config": CONFIG,
        "title": {"text": profile.name, "subtitle": lines, "fontSize": 22, "offset": 22},
        "concat": panels,
        "columns": 2 if len(panels) == 4 else 3,
        "align": "each",
        "resolve": {"scale": {"color": "independent"}},
    }


def draw_panel(panel: Panel) -> dict[str, Any]:
    """One panel as a Vega-Lite specification with its data."""
    if isinstance(panel, Heat):
        content = _draw_heat(panel)
    else:
        chart = _draw_curves(panel) if isinstance(panel, Curves) else _draw_trail(panel)
        # A concatenation of one, as heat maps are, so that the titles of panels are level.
        content = {"vconcat": [_specification(chart)]}
    subtitle = textwrap.wrap(panel.note, NOTE_WIDTH)
    return content | {"title": {"text": panel.title, "subtitle": subtitle}}


def _specification(chart: Any) -> dict[str, Any]:
    """A chart of Altair's without what belongs to a whole picture.

    Pictures are put together from these: Altair would copy and check all data at each level.
    """
    spec: dict[str, Any] = chart.to_dict(validate=False)
    (rows,) = spec.pop("datasets").values()
    shared = ("$schema", "config")
    return {name: part for name, part in spec.items() if name not in shared} | {
        "data": {"values": rows}
    }


def _draw_heat(heat: Heat) -> dict[str, Any]:
    """All maps of a panel, on one scale of colours."""
    several = len(heat.names) > 1
    across = 2 if several else 1
    scale = Scale.of_angles() if heat.values == "angles" else Scale.of_amounts(heat.maps)
    maps = [
        _specification(_draw_map(values, name, heat, scale, SIDE // across))
        for values, name in zip(heat.maps, heat.names, strict=True)
    ]
    rows = [maps[at : at + across] for at in range(0, len(maps), across)]
    return {
        "vconcat": [{"hconcat": row, "spacing": 18} for row in rows],
        "spacing": 14,
        "resolve": {"scale": {"color": "shared"}},
    }


def _draw_map(values: torch.Tensor, name: str, heat: Heat, scale: Scale, side: int) -> Any:
    """Cells as pixels of an image, with axes around it and an invisible point for its legend."""
    height, width = values.shape
    down, over = (max(1, round(side / n)) for n in (height, width))
    place = {"x": 0, "y": 0, "x2": width, "y2": height, "value": scale.domain[0]}
    picture = alt.InlineData(values=[place | {"url": data_uri(scale.colour(values))}])
    x = alt.X("x:Q", title=heat.columns, axis=_cell_axis(width)).scale(domain=[0, width])
    y = alt.Y("y:Q", title=heat.rows, axis=_cell_axis(height)).scale(
        domain=[0, height], reverse=True
    )
    base = alt.Chart(picture)
    cells = base.mark_image(
        width=over * width,
        height=down * height,
        align="left",
        baseline="top",
        aspect=False,
        aria=False,
    ).encode(x=x, y=y, url=alt.Url("url:N"))
    unseen = base.mark_point(opacity=0).encode(
        x=alt.X("x:Q"),
        y=alt.Y("y:Q"),
        color=alt.Color("value:Q", scale=scale.legend(), legend=_gradient(scale)),
    )
    chart = alt.layer(cells, unseen).properties(width=over * width, height=down * height)
    title = alt.TitleParams(name, fontSize=12, fontWeight="normal", color=SOFT, offset=6)
    return chart.properties(title=title) if name else chart


def _cell_axis(count: int) -> alt.Axis:
    every = next((n for n in (1, 2, 4, 8, 16, 32, 64, 128) if count / n <= 8), 256)
    ticks = [n + 0.5 for n in range(0, count, every)]
    return alt.Axis(
        values=ticks, labelExpr="floor(datum.value)", labelAngle=0, domain=False, grid=False
    )


def _gradient(scale: Scale | None = None) -> alt.Legend:
    """A strip of colours; with more digits where the values are close to one another."""
    digits = 4 if scale is not None and scale.domain[0] > 0 else 2
    return alt.Legend(
        title=None, gradientLength=120, gradientThickness=10, format=f".{digits}~g", tickCount=5
    )


def _draw_trail(trail: Trail) -> Any:
    """A line through the points, coloured by position, with some positions named."""
    middle, half = _frame(trail.points)
    named = _named(trail.points, 2 * half * NAME_DISTANCE)
    rows = [
        {"position": n, "x": x, "y": y, "name": str(n) if n in named else ""}
        for n, (x, y) in enumerate(trail.points.tolist())
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("x:Q", title=trail.x_label).scale(
            domain=[middle[0] - half, middle[0] + half], nice=False
        ),
        y=alt.Y("y:Q", title=trail.y_label).scale(
            domain=[middle[1] - half, middle[1] + half], nice=False
        ),
        order=alt.Order("position:Q"),
    )
    line = base.mark_line(color=EDGE, strokeWidth=1.2)
    points = base.mark_point(filled=True, size=26, opacity=1).encode(
        color=alt.Color(
            "position:Q", scale=alt.Scale(range=[COLOURS[0], COLOURS[1]]), legend=_gradient()
        ),
        tooltip=[alt.Tooltip("position:Q"), alt.Tooltip("x:Q", format=".3g")],
    )
    names = base.mark_text(dx=6, dy=-7, fontSize=10, color=SOFT).encode(text=alt.Text("name:N"))
    return alt.layer(line, points, names).properties(width=SIDE, height=SIDE)


def _named(points: torch.Tensor, distance: float) -> set[int]:
    """Every sixth position or so, but none that would be written over another."""
    named: list[int] = []
    for n in range(0, len(points), max(1, -(-len(points) // NAMED_POINTS))):
        if not named or (points[named] - points[n]).norm(dim=-1).min() > distance:
            named.append(n)
    return set(named)


def _frame(points: torch.Tensor) -> tuple[list[float], float]:
    """Centre and half side of the square around all points, so that directions keep their scale."""
    low, high = points.amin(0), points.amax(0)
    half = 0.54 * (high - low).max().item()
    middle: list[float] = ((low + high) / 2).tolist()
    return middle, max(half, 1e-6)


def _draw_curves(curves: Curves) -> Any:
    several = len(curves.names) > 1
    points = alt.InlineData(values=list(_points(curves)))
    colour = alt.Color(
        "curve:N",
        sort=list(curves.names),
        legend=alt.Legend(title=None, symbolOpacity=1, orient="top") if several else None,
        scale=alt.Scale(range=list(COLOURS)) if several else alt.Scale(range=[RISE]),
    )
    x = alt.X("x:Q", title=curves.x_label, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False))
    base = alt.Chart(points).encode(x=x, color=colour)
    layers = []
    height = alt.Scale(zero=not is_narrow(curves.values if curves.low is None else curves.low))
    if curves.low is not None:
        band = base.mark_area(opacity=0.08 if several else 0.18).encode(
            y=alt.Y("low:Q", title=curves.y_label, scale=height), y2=alt.Y2("high:Q")
        )
        layers.append(band)
    line = base.mark_line(
        strokeWidth=2, interpolate="step-after" if curves.steps else "linear"
    ).encode(
        y=alt.Y("value:Q", title=curves.y_label, scale=height),
        tooltip=[
            *([alt.Tooltip("curve:N", title="")] if several else []),
            alt.Tooltip("x:Q", title=curves.x_label),
            alt.Tooltip("value:Q", title=curves.y_label, format=".4g"),
        ],
    )
    return alt.layer(*layers, line).properties(width=SIDE, height=SIDE)


def _points(curves: Curves) -> Iterable[dict[str, Any]]:
    for number, name in enumerate(curves.names):
        for place, x in enumerate(curves.x.tolist()):
            point = {"curve": name, "x": x, "value": float(f"{curves.values[number, place]:.5g}")}
            if curves.low is not None and curves.high is not None:
                point["low"] = float(f"{curves.low[number, place]:.5g}")
                point["high"] = float(f"{curves.high[number, place]:.5g}")
            yield point


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
