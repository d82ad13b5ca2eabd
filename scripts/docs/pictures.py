"""Panels as SVG in a page, whose scheme they follow, and the pictures of encodings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

import vl_convert

from posenc.lab.visualization.panels import Panel
from posenc.lab.visualization.pictures import CONFIG, PARAMETERS, draw_panel
from posenc.lab.visualization.profile import make_profile

ROOM = {"left": 3, "top": 6, "right": 8, "bottom": 3}


def svg_of(panel: Panel, key: str) -> str:
    """A panel as SVG, with names of its own among those of a page."""
    chart = draw_panel(panel)
    del chart["title"]
    config = CONFIG | {"background": "transparent", "padding": ROOM, "aria": False}
    config["axis"] = CONFIG["axis"] | {"labelFontSize": 12, "titleFontSize": 12.5}
    svg = vl_convert.vegalite_to_svg(chart | {"config": config})
    svg = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", svg)  # the picture around it is named
    return re.sub(r'(\bid="|url\(#)', rf"\g<1>{key}-", svg)


def drawn(panels: Iterable[Panel], key: str) -> list[tuple[str, str]]:
    """Title and SVG of each panel."""
    return [(panel.title, svg_of(panel, f"{key}-{n}")) for n, panel in enumerate(panels)]


def side_by_side(parts: Iterable[tuple[str, str]], alt: str) -> str:
    """HTML of a picture: titles, as sentences begin, over panels."""
    begun = ((title[:1].upper() + title[1:], svg) for title, svg in parts)
    panels = "".join(
        f'<div class="panel"><p aria-hidden="true">{escape(title)}</p>{svg}</div>'
        for title, svg in begun
    )
    return f'<div class="picture" role="img" aria-label="{escape(alt, quote=True)}">{panels}</div>'


def of_encoding(name: str) -> str:
    """The picture of an encoding as HTML, its panels in words for those who do not see it."""
    profile = make_profile(name)
    titles = [
        panel.title.removeprefix("… ") + (f": {panel.note}" if panel.note else "")
        for panel in profile.panels
    ]
    parts = [
        (title, svg)
        for title, (_, svg) in zip(titles, drawn(profile.panels, "picture"), strict=True)
    ]
    caption = PARAMETERS.get(profile.parameters, "")
    words = f'<p class="picture-caption">{caption}</p>' if caption else ""
    return side_by_side(parts, f"{name}: {'; '.join(titles)}") + words


def save(name: str, path: Path) -> None:
    """Write the picture of an encoding, which its page includes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(of_encoding(name) + "\n")
