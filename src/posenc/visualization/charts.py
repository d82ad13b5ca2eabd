"""Charts with their captions and alternative texts, written as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import vl_convert

PICTURE_WIDTH = 760
"""Pixels a chart is wide as a picture, before doubling."""

LIGHT: dict[str, Any] = {
    "background": "#ffffff",
    "font": "sans-serif",
    "axis": {"gridColor": "#e8eaed", "domainColor": "#9aa0a6", "tickColor": "#9aa0a6"}
    | {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 10},
    "legend": {"labelFontSize": 12, "symbolStrokeWidth": 2.4},
    "title": {"anchor": "start", "fontSize": 15, "offset": 14},
    "view": {"stroke": None},
}


@dataclass(frozen=True)
class Chart:
    """A chart and the words around it.

    Args:
        key: name of its files.
        title: what it shows.
        guide: how to read it, true whatever the results.
        spec: Vega-Lite, with its data, as wide as what holds it.
        text: the same in words, for those who cannot see it.
    """

    key: str
    title: str
    guide: str
    spec: dict[str, Any]
    text: str

    @classmethod
    def of(cls, key: str, title: str, guide: str, chart: Any, text: str) -> Chart:
        """A chart by Altair, 320 pixels high."""
        sized = chart.properties(width="container", height=320, description=text)
        spec = sized.to_dict(validate=False)
        spec.pop("config", None)
        return cls(key, title, guide, spec, text)


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


def picture_files(charts: Iterable[Chart]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the charts' PNG and SVG files."""
    for chart in charts:
        spec = chart.spec | {"width": PICTURE_WIDTH, "title": chart.title, "config": LIGHT}
        svg = vl_convert.vegalite_to_svg(spec)
        yield f"{chart.key}.png", vl_convert.svg_to_png(svg, scale=2)
        yield f"{chart.key}.svg", svg.encode()
