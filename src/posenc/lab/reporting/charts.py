"""Charts with their captions and alternative texts, written as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import vl_convert

from posenc.lab.reporting.palette import LIGHT

PICTURE_WIDTH = 760
"""Pixels a chart is wide as a picture, before doubling."""

PICTURE_PADDING = 8
"""Pixels around a picture: fonts of readers may be wider than the one it is laid out with."""

THEME: dict[str, Any] = {
    "background": "transparent",
    "font": "sans-serif",
    "axis": {"gridColor": "--line", "domainColor": "--edge", "tickColor": "--edge"}
    | {"labelColor": "--soft", "labelFontSize": 12}
    | {"titleColor": "--soft", "titleFontSize": 12, "titleFontWeight": "normal"},
    # The title of a vertical axis stands above it, where it can be read without turning.
    "axisY": {
        "titleAngle": 0,
        "titleAlign": "left",
        "titleAnchor": "end",
        "titleBaseline": "bottom",
    }
    | {"titleX": -30, "titleY": -9},
    "axisX": {"titlePadding": 8},
    "title": {"anchor": "start", "color": "--ink", "fontSize": 15, "offset": 14},
    "view": {"stroke": None},
}
"""Vega's configuration of all charts. Colours are by name; see ``palette.py``."""


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Args:
        key: name of its files.
        title: what it shows.
        guide: how to read it, true whatever the results.
        spec: Vega-Lite, with its data, as wide as what holds it.
        text: the same in words, for those who cannot see it.
        width: pixels that it is wide as a picture.
    """

    key: str
    title: str
    guide: str
    spec: dict[str, Any]
    text: str
    width: int = PICTURE_WIDTH

    @classmethod
    def of(
        cls,
        key: str,
        title: str,
        guide: str,
        layers: Iterable[Any],
        text: str,
        *,
        width: int = PICTURE_WIDTH,
        height: int = 320,
        narrow: int | None = None,
    ) -> Chart:
        """A chart by Altair, in which a name can be picked.

        Its layers are put together here: Altair copies all of them at each step of it.

        Args:
            key, title, guide, text, width: as of the class.
            layers: Altair's charts, from the lowest one.
            height: pixels of its plot.
            narrow: the same on a narrow page.
        """
        parts = [layer.to_dict(validate=False) for layer in layers]
        spec = {
            "$schema": parts[0]["$schema"],
            "datasets": {name: rows for part in parts for name, rows in part["datasets"].items()},
            "description": text,
            "height": height,
            "layer": [{key: part[key] for key in ("data", "encoding", "mark")} for part in parts],
            "params": [{"name": "picked", "value": ""}],
            "width": "container",
        }
        if narrow is not None:
            spec["usermeta"] = {"narrow": narrow}
        return cls(key, title, guide, spec, text, width)


def text_of(
    title: str, axes: tuple[str, str], series: Iterable[tuple[str, list[tuple[float, str]]]]
) -> str:
    """A chart in words: its axes, and where each series begins and ends.

    Args:
        title: of the chart.
        axes: what is across, and what is up.
        series: names with (x, value as it is shown), in the order of x.
    """
    parts = []
    for name, points in series:
        if not points:
            continue
        (first, begins), (last, ends) = points[0], points[-1]
        end = "" if first == last else f", {ends} at {last:g}"
        parts.append(f"{name}: {begins} at {first:g}{end}")
    return f"{title}. {axes[1]} against {axes[0]}. {'; '.join(parts)}."


def coloured(value: Any, colours: Mapping[str, str]) -> Any:
    """A specification or configuration with the colours of these names."""
    if isinstance(value, dict):
        return {key: coloured(inner, colours) for key, inner in value.items()}
    if isinstance(value, list):
        return [coloured(inner, colours) for inner in value]
    return colours.get(value, value) if isinstance(value, str) else value


def picture_files(charts: Iterable[Chart]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the charts' PNG and SVG files, on white."""
    config = coloured(THEME, LIGHT) | {"background": LIGHT["--paper"]}
    for chart in charts:
        fit = {"type": "fit-x", "contains": "padding"}  # names beside the plot are within the width
        layout = {"width": chart.width, "autosize": fit, "padding": PICTURE_PADDING}
        layout |= {"title": chart.title, "config": config}
        svg = vl_convert.vegalite_to_svg(coloured(chart.spec, LIGHT) | layout)
        yield f"{chart.key}.png", vl_convert.svg_to_png(svg, scale=2)
        yield f"{chart.key}.svg", svg.encode()
