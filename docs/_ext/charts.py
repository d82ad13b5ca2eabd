"""Charts of the gallery: an example leaves its picture in ``chart``, its words in ``alt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert
from sphinx_gallery.scrapers import figure_rst

from posenc.reporting.palette import COLOURS
from posenc.visualization.pictures import CONFIG

STYLE = CONFIG | {"range": {"category": list(COLOURS)}}
STYLE |= {part: CONFIG[part] | {"labelLimit": 300} for part in ("axis", "legend")}
STYLE |= {"mark": {"color": COLOURS[0]}}
del STYLE["legend"]["symbolType"]  # bars have no stroke to show
"""Colours that colour-blind readers tell apart, as in reports."""


def scraper(block: tuple[Any, ...], variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """Write ``chart`` as PNG and return the directive that shows it; none without a chart."""
    left = variables["example_globals"]
    chart = left.pop("chart", None)
    if chart is None:
        return ""
    path = Path(next(variables["image_path_iterator"]))
    path.write_bytes(vl_convert.vegalite_to_png(chart.to_dict() | {"config": STYLE}, scale=2))
    return str(figure_rst([str(path)], settings["src_dir"], left.pop("alt", "")))
