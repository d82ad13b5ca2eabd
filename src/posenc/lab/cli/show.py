"""``posenc show`` and ``posenc gallery``: encodings in detail, one or several, or all on a page."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from posenc.errors import ArgumentError
from posenc.lab.cli.console import ERRORS, OUT, new_table, print_json
from posenc.lab.cli.listing import describe
from posenc.lab.cli.options import Json, complete_encoding, complete_encodings, flag, option
from posenc.registration import parse_name, parse_options
from posenc.registry import ENCODINGS

if TYPE_CHECKING:
    from posenc.lab.visualization.panels import Curves, Heat, Profile

BARS = "▁▂▃▄▅▆▇█"

WIDEST = 100
"""Maximum width of text in characters."""


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="Encoding, as named by posenc list, or several joined by +.",
            autocompletion=complete_encoding,
        ),
    ],
    options: Annotated[
        list[str] | None,
        option(
            "Encoding option KEY=VALUE; repeatable.", "none", "--option", "-o", metavar="KEY=VALUE"
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Output file for the plot: .png, .svg or .html.", "no file")
    ] = None,
    bidirectional: Annotated[bool, flag("--bidirectional", "Without a causal mask.")] = False,
    length: Annotated[int, typer.Option(min=2, max=512, help="Number of tokens in the plot.")] = 48,
    json: Json = False,
) -> None:
    """Show the formula, options, claims and plot of an encoding.

    Examples:

        posenc show rope

        posenc show rope+alibi

        posenc show t5 --option buckets=8 --out t5.png
    """
    import posenc.extension  # noqa: F401 - a refusal tells its names apart from unknown ones

    parsed = parse_name(ENCODINGS, name)
    entries = parsed.entries
    valid = {name: kind for entry in entries.values() for name, kind in entry.options().items()}
    chosen = parsed.options_with(parse_options(options or [], valid, of=parsed.name))
    from posenc.lab.visualization.profile import make_profile

    profile = make_profile(parsed.name, options=chosen, causal=not bidirectional, length=length)
    if out is not None:
        from posenc.lab.visualization.pictures import save_picture

        save_picture(profile, out, summary=" ".join(entry.summary for entry in entries.values()))
    if json:
        described = [
            describe(name, entry) | {"doc": inspect.getdoc(entry.factory)}
            for name, entry in entries.items()
        ]
        print_json(described if len(described) > 1 else described[0])
        return
    for number, part in enumerate(entries):
        if number:
            OUT.print()
        _print_text(part)
    _print_picture(profile)
    if out is not None:
        OUT.print(f"\nPicture: {out}")


def _print_text(encoding: str) -> None:
    """Print the description of an encoding."""
    from posenc.lab.visualization.catalogue import SIZES, sheet
    from posenc.lab.visualization.formulas import is_formula

    details = sheet(encoding)
    entry, document, width = details.entry, details.document, min(OUT.width, WIDEST)
    claims, citation = entry.claims, entry.citation
    OUT.print(Text.assemble((encoding, "bold cyan"), f"  {entry.summary}"), width=width)
    for paragraph in (document.summary, *document.body):
        indent = 2 if is_formula(paragraph) else 0
        OUT.print()
        OUT.print(
            Padding(Text(paragraph.replace("``", "")), (0, 0, 0, indent), expand=False), width=width
        )
    facts = _table()
    facts.add_row("sites", ", ".join(claims.sites) or "none")
    facts.add_row("claims", ", ".join(details.traits))
    facts.add_row("beyond training length", claims.extrapolates)
    facts.add_row("cost", claims.cost)
    size = f"{details.size}, at width {SIZES['dim']} with {SIZES['heads']} heads"
    facts.add_row("parameters", "none" if details.size == "0" else size)
    facts.add_row("on the CPU", details.served("cpu"))
    facts.add_row("on CUDA", details.served("cuda"))
    if citation is not None:
        source = f"{citation.authors} {citation.year}. {citation.title}. {citation.url}"
        facts.add_row("cite", source)
    OUT.print()
    OUT.print(facts, width=width)
    options = _table()
    for names, text in document.arguments:
        for name in names.replace(" ", "").split(","):
            parameter = entry.parameters()[name]
            has_default = parameter.default is not parameter.empty
            default = f" = {parameter.default!r}" if has_default else ""
            options.add_row(f"{name}{default}", Text(text.replace("``", "")))
    if document.arguments:
        OUT.print(Text("\noptions and defaults", "dim"))
        OUT.print(options, width=width)


def _table() -> Table:
    """A table of names and values."""
    table = new_table(header=False)
    table.add_column(style="dim", overflow="fold", max_width=28)
    table.add_column()
    return table


def _print_picture(profile: Profile) -> None:
    """Print heat maps (on terminals with colours) and curves."""
    from posenc.lab.visualization.panels import Curves, Heat

    for panel in profile.panels:
        if isinstance(panel, Heat) and OUT.color_system is not None:
            _print_map(panel)
        elif isinstance(panel, Curves):
            _print_curves(panel)
    if profile.parameters != "none":
        note = "Initial values, which training changes."
        if profile.parameters == "random":
            note = "Random values; with the initial values the encoding has no effect."
        OUT.print(Text(f"\n  {note}", "dim"))


def _print_map(heat: Heat) -> None:
    """Print the first map of a panel in half blocks, cropped to the terminal."""
    _, height, width = heat.maps.shape
    step = max(1, -(-width // max(16, OUT.width - 4)))
    values = heat.maps[0, :, ::step].nan_to_num(0.0)
    most = max(values.abs().max().item(), 1e-9)
    name = f"{heat.names[0]}, " if heat.names[0] else ""
    scale = f"from {-most:.3g} (red) to {most:.3g} (blue)"
    OUT.print(Text(f"\n{heat.title}", "dim"))
    OUT.print(Text(f"  {name}{heat.rows} down, {heat.columns} across, {scale}", "dim"))
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
    """Colour for a value from -1 (red) over 0 (white) to 1 (blue)."""
    full = (178, 24, 43) if share < 0 else (33, 102, 172)
    weight = min(1.0, abs(share))
    red, green, blue = (round(247 + (end - 247) * weight) for end in full)
    return f"#{red:02x}{green:02x}{blue:02x}"


def gallery(
    out: Annotated[Path, option("Output file (.html).")] = Path("posenc-gallery.html"),
    encodings: Annotated[
        str | None,
        option("Encodings to draw, comma-separated.", "all", autocompletion=complete_encodings),
    ] = None,
) -> None:
    """Write an HTML page with the formula, plots, claims and source of every encoding.

    Examples:

        posenc gallery

        posenc gallery --encodings rope,alibi,t5 --out three.html
    """
    chosen = None
    if encodings is not None:
        chosen = [name.strip() for name in encodings.split(",") if name.strip()]
    if chosen == []:
        raise ArgumentError(
            "--encodings",
            expected="at least one name",
            got=repr(encodings),
            remedy="Run posenc list to see all names.",
        )
    if out.suffix not in (".html", ".htm"):
        raise ArgumentError(
            "--out",
            expected="a file ending in .html",
            got=out.name,
            remedy=f"Write {out.with_suffix('.html').name}, for example.",
        )
    from posenc.lab.visualization.gallery import write_gallery

    with ERRORS.status(Text("Drawing …")) as status:
        write_gallery(
            out, names=chosen, progress=lambda name: status.update(Text(f"Drawing {name} …"))
        )
    OUT.print(f"Gallery: {out}", soft_wrap=True)
