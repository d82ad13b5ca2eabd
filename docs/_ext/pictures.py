"""Pictures in pages: their styles, and a directive that draws panels computed by the library.

``{picture} NAME`` puts the panels of ``PICTURES[NAME]`` side by side as SVG that follows the
scheme of the page. ``:alt:`` is required; the content is the caption. Pages below ``zh/`` get the
labels of ``CHINESE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from scripts.docs.pictures import drawn, side_by_side
from sphinx.util.docutils import SphinxDirective
from theory_panels import CHINESE, PICTURES, places

from posenc.lab.reporting.palette import DARK, LIGHT
from posenc.lab.visualization.panels import Panel


def translated(panel: Panel, words: dict[str, str]) -> Panel:
    """A panel whose labels are those of another language, where there are any."""

    def word(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(word, value))
        return words.get(value, value) if isinstance(value, str) else value

    return replace(panel, **{f.name: word(getattr(panel, f.name)) for f in fields(panel)})


def rendered(name: str, alt: str, *, chinese: bool) -> str:
    """The panels of a picture as HTML."""
    words = CHINESE if chinese else {}
    if name == "places":
        return side_by_side([("", places(words))], alt)
    return side_by_side(drawn([translated(panel, words) for panel in PICTURES[name]()], name), alt)


def styles() -> str:
    """Styles of pictures, whose colours for light paper have a twin for dark paper."""
    rules = [
        f'html[data-theme="dark"] .picture [{part}="{colour}"] {{ {part}: {DARK[name]}; }}'
        for name, colour in LIGHT.items()
        for part in ("stroke", "fill")
        if name != "--paper"
    ]
    return "\n".join(
        [
            ".picture { display: grid; column-gap: 1.5rem;"
            " grid-template-columns: repeat(auto-fit, minmax(min(16rem, 100%), 1fr)); }",
            ".picture .panel { display: grid; grid-template-rows: subgrid; grid-row: span 2;"
            " max-width: 26rem; margin-bottom: .75rem; }",
            ".picture .panel p { margin: 0 0 .3rem; font-size: .9rem; text-wrap: pretty; }",
            ".picture svg { display: block; max-width: 100%; height: auto; }",
            ".picture-caption { font-size: .9rem; color: var(--pst-color-text-muted); }",
            ".picture .panel:only-child { max-width: 40rem; }",
            "div.math { flex-direction: row; justify-content: safe center; margin-block: 1rem; }",
            *rules,
        ]
    )


def write_styles(app: Any) -> None:
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pictures.css").write_text(styles())


class Picture(SphinxDirective):
    """The directive."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        alt = self.options.get("alt")
        if not alt:
            raise self.error("A picture needs :alt:, the same in words.")
        chinese = self.env.docname.startswith("zh/")
        html = rendered(self.arguments[0], " ".join(alt.split()), chinese=chinese)
        caption = nodes.container(classes=["picture-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        return [nodes.raw("", html, format="html"), caption]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("picture", Picture)
    app.add_css_file("pictures.css")
    app.connect("builder-inited", write_styles)
    return {"parallel_read_safe": True}
