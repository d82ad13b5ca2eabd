"""``posenc show``: one method."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from posenc.cli.completion import complete_encoding
from posenc.cli.console import OUT, print_json
from posenc.cli.listing import describe
from posenc.options import parse_options
from posenc.registry import ENCODINGS

if TYPE_CHECKING:
    from posenc.visualization.panels import Curves, Heat, Portrait

__all__ = ["show"]

BARS = "▁▂▃▄▅▆▇█"

WIDEST = 100
"""Characters a line of text, however wide the terminal."""


def show(
    name: Annotated[
        str,
        typer.Argument(help="A method, as posenc list names it.", autocompletion=complete_encoding),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="KEY=VALUE",
            show_default="none",
            help="An option of the method.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            show_default="no picture", help="Write the picture here: .png, .svg or .html."
        ),
    ] = None,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Attention to both sides.")
    ] = False,
    length: Annotated[int, typer.Option(min=2, max=512, help="Tokens in the picture.")] = 48,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show a method: its formula, options and claims, and a picture of what it does.

    Examples:

        posenc show rope

        posenc show t5 --option buckets=8 --out t5.png
    """
    entry = ENCODINGS.require(name)
    options = parse_options(option or [], entry.options(), of=name)
    from posenc.visualization.profile import portray

    portrait = portray(name, options=options, causal=not bidirectional, length=length)
    if out is not None:
        from posenc.visualization.pictures import save_picture

        save_picture(portrait, out, summary=entry.summary)
    if json:
        print_json(describe(name, entry) | {"doc": inspect.getdoc(entry.factory)})
        return
    _print_text(name)
    _print_picture(portrait)
    if out is not None:
        OUT.print(f"\nPicture: {out}")


def _print_text(name: str) -> None:
    """Everything that is known of the method, in lines short enough to be read."""
    from posenc.visualization.catalogue import SIZES, sheet
    from posenc.visualization.html import is_formula

    told = sheet(name)
    entry, document, width = told.entry, told.document, min(OUT.width, WIDEST)
    claims, citation = entry.claims, entry.citation
    OUT.print(Text.assemble((name, "bold cyan"), f"  {entry.summary}"), width=width)
    for paragraph in (document.summary, *document.body):
        indent = 2 if is_formula(paragraph) else 0
        OUT.print()
        OUT.print(
            Padding(Text(paragraph.replace("``", "")), (0, 0, 0, indent), expand=False), width=width
        )
    facts = _table()
    facts.add_row("sites", ", ".join(claims.sites) or "none")
    facts.add_row("claims", ", ".join(told.traits))
    facts.add_row("past its length", claims.extrapolates)
    facts.add_row("cost", claims.cost)
    size = f"{told.size}, at width {SIZES['dim']} with {SIZES['heads']} heads"
    facts.add_row("parameters", "none" if told.size == "0" else size)
    facts.add_row("on the CPU", told.served("cpu"))
    facts.add_row("on CUDA", told.served("cuda"))
    if citation is not None:
        source = f"{citation.authors} {citation.year}. {citation.title}. {citation.url}"
        facts.add_row("cite", source)
    OUT.print()
    OUT.print(facts, width=width)
    options = _table()
    for names, text in document.arguments:
        for option in names.replace(" ", "").split(","):
            parameter = entry.parameters()[option]
            given = parameter.default is not parameter.empty
            default = f" = {parameter.default!r}" if given else ""
            options.add_row(f"{option}{default}", Text(text.replace("``", "")))
    if document.arguments:
        OUT.print(Text("\noptions, with their defaults", "dim"))
        OUT.print(options, width=width)


def _table() -> Table:
    """Names and what they are."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold", max_width=28)
    table.add_column()
    return table


def _print_picture(portrait: Portrait) -> None:
    """Maps in half blocks where the terminal has colours, curves as bars."""
    from posenc.visualization.panels import Curves, Heat

    for panel in portrait.panels:
        if isinstance(panel, Heat) and OUT.color_system is not None:
            _print_map(panel)
        elif isinstance(panel, Curves):
            _print_curves(panel)
    if portrait.parameters != "none":
        what = "These are initial values, which training changes."
        if portrait.parameters == "random":
            what = "These are random values: with the initial ones it does nothing."
        OUT.print(Text(f"\n  {what}", "dim"))


def _print_map(heat: Heat) -> None:
    """The first map of a panel, two cells a character, as much of it as there is room for."""
    _, height, width = heat.maps.shape
    step = max(1, -(-width // max(16, OUT.width - 4)))
    values = heat.maps[0, :, ::step].nan_to_num(0.0)
    most = max(values.abs().max().item(), 1e-9)
    which = f"{heat.names[0]}, " if heat.names[0] else ""
    scale = f"from {-most:.3g} (red) to {most:.3g} (blue)"
    OUT.print(Text(f"\n{heat.title}", "dim"))
    OUT.print(Text(f"  {which}{heat.rows} down, {heat.columns} across, {scale}", "dim"))
    for row in range(0, height, 2):
        line = Text("  ")
        for column in range(values.shape[1]):
            upper = _colour(values[row, column].item() / most)
            below = values[row + 1, column].item() / most if row + 1 < height else 0.0
            line.append("▀", Style(color=upper, bgcolor=_colour(below)))
        OUT.print(line)


def _print_curves(curves: Curves) -> None:
    shown = min(curves.values.shape[-1], OUT.width - 40)
    first, last = curves.x[0].item(), curves.x[shown - 1].item()
    OUT.print(Text(f"\n{curves.title.lstrip('… ').capitalize()}", "dim"))
    OUT.print(Text(f"  {curves.y_label} over {curves.x_label}, {first:g} to {last:g}", "dim"))
    longest = max(map(len, curves.names))
    for name, values in zip(curves.names, curves.values[:, :shown], strict=True):
        low, high = values.min().item(), values.max().item()
        span = max(high - low, 1e-9)
        bars = "".join(BARS[round((v - low) / span * 7)] for v in values.tolist())
        label = f"  {name.ljust(longest)} " if name else "  "
        OUT.print(Text.assemble((label, "dim"), bars, (f"  {low:.3g} … {high:.3g}", "dim")))


def _colour(share: float) -> str:
    """White at 0, towards red below and blue above, for shares from -1 to 1."""
    full = (178, 24, 43) if share < 0 else (33, 102, 172)
    weight = min(1.0, abs(share))
    red, green, blue = (round(247 + (end - 247) * weight) for end in full)
    return f"#{red:02x}{green:02x}{blue:02x}"
