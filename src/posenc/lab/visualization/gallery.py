"""The gallery: every method on one page, with its formulas, pictures and claims."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import vl_convert
from markupsafe import Markup

from posenc import __version__
from posenc.lab.reporting.page import environment, source, styles
from posenc.lab.reporting.palette import LIGHT
from posenc.lab.visualization.catalogue import SITES, SIZES, Sheet, group, sheet
from posenc.lab.visualization.formulas import is_formula, prose
from posenc.lab.visualization.panels import Panel
from posenc.lab.visualization.pictures import CONFIG, PARAMETERS, draw_panel
from posenc.lab.visualization.profile import make_profile
from posenc.registry import ENCODINGS
from posenc.storage import write_bytes

__all__ = ["render_gallery", "write_gallery"]

PADDING = {"left": 3, "top": 6, "right": 8, "bottom": 3}
"""Pixels around a picture, for what labels reach beyond what Vega measures."""

USUAL = ("sinusoidal", "rope", "alibi", "t5")
"""Methods that the page begins with."""


@dataclass(frozen=True)
class Figure:
    """A panel drawn: its words and, in SVG, itself."""

    title: str
    note: str
    svg: Markup


@dataclass(frozen=True)
class Exhibit:
    """A method with its pictures, and a note on the parameters that they were drawn with."""

    sheet: Sheet
    figures: tuple[Figure, ...]
    note: str

    @property
    def words(self) -> str:
        """Text that the filter looks in."""
        entry = self.sheet.entry
        words = (self.sheet.name, entry.summary, *self.sheet.traits, *entry.claims.sites)
        return " ".join(words).lower().replace("_", " ") + f" {self.sheet.name}"


def write_gallery(
    path: Path | str,
    *,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Write the gallery into a file; one that is there is replaced.

    Args: as ``render_gallery``.

    Raises:
        UnknownNameError: on a name that is not in the registry.
        OutputError: when the file cannot be written.
    """
    write_bytes(Path(path), render_gallery(names=names, progress=progress).encode())


def render_gallery(
    *, names: Sequence[str] | None = None, progress: Callable[[str], None] = lambda name: None
) -> str:
    """The gallery as HTML with all its pictures and styles.

    Args:
        names: of the methods; all by default.
        progress: called with each name before it is drawn.

    Raises:
        UnknownNameError: on a name that is not in the registry.
    """
    chosen = tuple(dict.fromkeys(ENCODINGS if names is None else names))
    for name in chosen:
        ENCODINGS.require(name)
    exhibits = {}
    for name in chosen:
        progress(name)
        exhibits[name] = _exhibit(name)
    templates = environment("posenc.lab.visualization")
    templates.filters["prose"], templates.tests["formula"] = prose, is_formula
    sites = group(chosen)
    usual = [exhibits[name] for name in USUAL if name in exhibits]
    first = [("usual", "The usual", "What most models have.", usual)] if usual else []
    others = {site: [n for n in names if n not in USUAL] for site, names in sites.items()}
    return templates.get_template("gallery.html.jinja").render(
        index=[(SITES[site][0], [exhibits[n] for n in names]) for site, names in sites.items()],
        groups=first
        + [
            (site or "none", *SITES[site], [exhibits[name] for name in methods])
            for site, methods in others.items()
            if methods
        ],
        count=len(chosen),
        sizes=SIZES,
        version=__version__,
        script=source(templates, "filter.js"),
        styles=styles(templates, "style.css", "gallery.css") + _recoloured(".plot"),
    )


def _exhibit(name: str) -> Exhibit:
    profile = make_profile(name)
    figures = [
        _figure(panel, key=f"{name}-{number}") for number, panel in enumerate(profile.panels)
    ]
    return Exhibit(sheet(name), tuple(figures), PARAMETERS.get(profile.parameters, ""))


def _figure(panel: Panel, *, key: str) -> Figure:
    chart = draw_panel(panel)
    del chart["title"]  # it stands above the picture, where it can be wrapped and read aloud
    config = CONFIG | {"background": "transparent", "padding": PADDING, "aria": False}
    config["axis"] = CONFIG["axis"] | {"labelFontSize": 12, "titleFontSize": 12.5}
    svg = vl_convert.vegalite_to_svg(chart | {"config": config})
    # Names inside a picture are its own; on a page they must not meet those of another.
    svg = re.sub(r'(\bid="|url\(#)', rf"\g<1>{key}-", svg)
    title = panel.title.removeprefix("… ")
    return Figure(title[0].upper() + title[1:], panel.note, Markup(svg))


def _recoloured(selector: str) -> Markup:
    """Styles by which pictures drawn for light paper follow the paper."""
    rules = [
        f'{selector} [{part}="{colour}"] {{ {part}: var({name}); }}'
        for name, colour in LIGHT.items()
        for part in ("stroke", "fill")
        if name != "--paper"
    ]
    return Markup("\n".join(rules) + "\n")
