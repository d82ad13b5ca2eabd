"""Pictures of encodings, drawn by Vega-Lite from their profiles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vl_convert

from posenc.errors import ArgumentError
from posenc.reporting.palette import COLOURS, LIGHT
from posenc.storage import write_bytes
from posenc.visualization.colours import RISE, Scale, is_narrow
from posenc.visualization.panels import Curves, Heat, Panel, Profile, Trail
from posenc.visualization.raster import data_uri

FORMATS = (".png", ".svg", ".html")

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"

SIDE = 288
"""Pixels that a panel is wide and high, roughly: cells have whole ones."""

NAMED_POINTS = 8

APART = 0.09
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
        "$schema": SCHEMA,
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
        content = {"vconcat": [chart]}
    subtitle = textwrap.wrap(panel.note, NOTE_WIDTH)
    return content | {"title": {"text": panel.title, "subtitle": subtitle}}


def _number(field: str, **options: Any) -> dict[str, Any]:
    """Encoding by a field of numbers."""
    return {"field": field, "type": "quantitative", **options}


def _name(field: str, **options: Any) -> dict[str, Any]:
    """Encoding by a field of names."""
    return {"field": field, "type": "nominal", **options}


def _draw_heat(heat: Heat) -> dict[str, Any]:
    """All maps of a panel, on one scale of colours."""
    several = len(heat.names) > 1
    across = 2 if several else 1
    scale = Scale.of_angles() if heat.values == "angles" else Scale.of_amounts(heat.maps)
    maps = [
        _draw_map(values, name, heat, scale, SIDE // across)
        for values, name in zip(heat.maps, heat.names, strict=True)
    ]
    rows = [maps[at : at + across] for at in range(0, len(maps), across)]
    return {
        "vconcat": [{"hconcat": row, "spacing": 18} for row in rows],
        "spacing": 14,
        "resolve": {"scale": {"color": "shared"}},
    }


def _draw_map(
    values: torch.Tensor, name: str, heat: Heat, scale: Scale, side: int
) -> dict[str, Any]:
    """Cells as pixels of an image, with axes around it and an invisible point for its legend."""
    height, width = values.shape
    size = {
        "width": max(1, round(side / width)) * width,
        "height": max(1, round(side / height)) * height,
    }
    place = {"x": 0, "y": 0, "x2": width, "y2": height, "value": scale.domain[0]}
    x = {"title": heat.columns, "axis": _cell_axis(width), "scale": {"domain": [0, width]}}
    y = {"title": heat.rows, "axis": _cell_axis(height)}
    y["scale"] = {"domain": [0, height], "reverse": True}
    image = {"type": "image", "align": "left", "baseline": "top", "aspect": False, "aria": False}
    cells = {
        "mark": image | size,
        "encoding": {"x": _number("x", **x), "y": _number("y", **y), "url": _name("url")},
    }
    colour = _number("value", scale=scale.legend(), legend=_gradient(scale))
    unseen = {
        "mark": {"type": "point", "opacity": 0},
        "encoding": {"x": _number("x"), "y": _number("y"), "color": colour},
    }
    title = {"text": name, "fontSize": 12, "fontWeight": "normal", "color": SOFT, "offset": 6}
    picture = {"values": [place | {"url": data_uri(scale.colour(values))}]}
    chart = {"data": picture, "layer": [cells, unseen], **size}
    return chart | {"title": title} if name else chart


def _cell_axis(count: int) -> dict[str, Any]:
    every = next((n for n in (1, 2, 4, 8, 16, 32, 64, 128) if count / n <= 8), 256)
    ticks = [n + 0.5 for n in range(0, count, every)]
    labels = {"values": ticks, "labelExpr": "floor(datum.value)", "labelAngle": 0}
    return labels | {"domain": False, "grid": False}


def _gradient(scale: Scale | None = None) -> dict[str, Any]:
    """A strip of colours; with more digits where the values are close to one another."""
    digits = 4 if scale is not None and scale.domain[0] > 0 else 2
    strip = {"title": None, "gradientLength": 120, "gradientThickness": 10}
    return strip | {"format": f".{digits}~g", "tickCount": 5}


def _draw_trail(trail: Trail) -> dict[str, Any]:
    """A line through the points, coloured by position, with some positions named."""
    middle, half = _frame(trail.points)
    named = _named(trail.points, 2 * half * APART)
    rows = [
        {"position": n, "x": x, "y": y, "name": str(n) if n in named else ""}
        for n, (x, y) in enumerate(trail.points.tolist())
    ]
    sides = [{"domain": [centre - half, centre + half], "nice": False} for centre in middle]
    where = {
        "x": _number("x", title=trail.x_label, scale=sides[0]),
        "y": _number("y", title=trail.y_label, scale=sides[1]),
        "order": _number("position"),
    }
    colour = {"scale": {"range": [COLOURS[0], COLOURS[1]]}, "legend": _gradient()}
    shown = [_number("position"), _number("x", format=".3g")]
    line = {"mark": {"type": "line", "color": EDGE, "strokeWidth": 1.2}, "encoding": where}
    points = {
        "mark": {"type": "point", "filled": True, "size": 26, "opacity": 1},
        "encoding": where | {"color": _number("position", **colour), "tooltip": shown},
    }
    names = {
        "mark": {"type": "text", "dx": 6, "dy": -7, "fontSize": 10, "color": SOFT},
        "encoding": where | {"text": _name("name")},
    }
    layers = [line, points, names]
    return {"data": {"values": rows}, "layer": layers, "width": SIDE, "height": SIDE}


def _named(points: torch.Tensor, apart: float) -> set[int]:
    """Every sixth position or so, but none that would be written over another."""
    named: list[int] = []
    for n in range(0, len(points), max(1, -(-len(points) // NAMED_POINTS))):
        if not named or (points[named] - points[n]).norm(dim=-1).min() > apart:
            named.append(n)
    return set(named)


def _frame(points: torch.Tensor) -> tuple[list[float], float]:
    """Centre and half side of the square around all points, so that directions keep their scale."""
    low, high = points.amin(0), points.amax(0)
    half = 0.54 * (high - low).max().item()
    middle: list[float] = ((low + high) / 2).tolist()
    return middle, max(half, 1e-6)


def _draw_curves(curves: Curves) -> dict[str, Any]:
    several = len(curves.names) > 1
    legend = {"title": None, "symbolOpacity": 1, "orient": "top"}
    common = {
        "x": _number("x", title=curves.x_label, scale={"nice": False}, axis={"grid": False}),
        "color": _name(
            "curve",
            sort=list(curves.names),
            legend=legend if several else None,
            scale={"range": list(COLOURS) if several else [RISE]},
        ),
    }
    from_zero = not is_narrow(curves.values if curves.low is None else curves.low)
    height = {"title": curves.y_label, "scale": {"zero": from_zero}}
    layers = []
    if curves.low is not None:
        ends = {"y": _number("low", **height), "y2": {"field": "high"}}
        band = {"type": "area", "opacity": 0.08 if several else 0.18}
        layers.append({"mark": band, "encoding": common | ends})
    shown = [_name("curve", title="")] if several else []
    shown.append(_number("x", title=curves.x_label))
    shown.append(_number("value", title=curves.y_label, format=".4g"))
    steps = "step-after" if curves.steps else "linear"
    layers.append(
        {
            "mark": {"type": "line", "strokeWidth": 2, "interpolate": steps},
            "encoding": common | {"y": _number("value", **height), "tooltip": shown},
        }
    )
    points = {"values": list(_points(curves))}
    return {"data": points, "layer": layers, "width": SIDE, "height": SIDE}


def _points(curves: Curves) -> Iterable[dict[str, Any]]:
    for number, name in enumerate(curves.names):
        for place, x in enumerate(curves.x.tolist()):
            point = {"curve": name, "x": x, "value": float(f"{curves.values[number, place]:.5g}")}
            if curves.low is not None and curves.high is not None:
                point["low"] = float(f"{curves.low[number, place]:.5g}")
                point["high"] = float(f"{curves.high[number, place]:.5g}")
            yield point
