"""Charts of the gallery: an example leaves its picture in ``chart``, its words in ``alt``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import vl_convert
from scripts.docs.pictures import side_by_side

from posenc.lab.reporting.palette import COLOURS
from posenc.lab.visualization.pictures import CONFIG

STYLE = CONFIG | {"range": {"category": list(COLOURS)}}
STYLE |= {part: CONFIG[part] | {"labelLimit": 300} for part in ("axis", "legend")}
STYLE |= {"mark": {"color": COLOURS[0]}}
del STYLE["legend"]["symbolType"]  # bars have no stroke to show
"""Colours that colour-blind readers tell apart, as in reports."""

IN_PAGE = STYLE | {"background": "transparent", "padding": 4}

ROLES = re.compile(r' (role|aria-\w+)="[^"]*"')
"""Roles of a picture's parts: it is one image, told in words."""


def scraper(block: tuple[Any, ...], variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return ``chart`` in the scheme of the page, and write the thumbnail; none without a chart."""
    left = variables["example_globals"]
    chart = left.pop("chart", None)
    if chart is None:
        return ""
    drawn = chart.to_dict()
    path = Path(next(variables["image_path_iterator"]))
    path.write_bytes(vl_convert.vegalite_to_png(drawn | {"config": STYLE}, scale=2))
    svg = vl_convert.vegalite_to_svg(drawn | {"config": IN_PAGE})
    svg = ROLES.sub("", svg)
    picture = side_by_side([("", svg)], " ".join(left.pop("alt").split()))
    return "\n.. raw:: html\n\n" + "".join(f"    {line}\n" for line in picture.splitlines())
