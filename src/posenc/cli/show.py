"""``posenc show``: one method."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.style import Style
from rich.table import Table
from rich.text import Text

from posenc.cli.console import OUT, print_json
from posenc.cli.listing import describe
from posenc.entry import Entry
from posenc.errors import ArgumentError, UnknownNameError
from posenc.registry import ENCODINGS

if TYPE_CHECKING:
    from posenc.lab.pictures import Portrait

__all__ = ["show"]

BARS = "▁▂▃▄▅▆▇█"
FORMATS = (".png", ".svg", ".html")


def show(
    name: Annotated[str, typer.Argument(help="A method, as posenc list names it.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the method."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the picture here: .png, .svg or .html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show a method: its formula, options and claims, and a picture of what it does.

    Examples:

        posenc show rope

        posenc show t5 --option buckets=8 --out t5.png
    """
    if name not in ENCODINGS:
        raise UnknownNameError.of("encoding", name, ENCODINGS)
    entry = ENCODINGS[name]
    options = _parse(option or [], entry, name)
    if json:
        print_json(describe(name, entry) | {"doc": inspect.getdoc(entry.factory)})
    from posenc.lab.pictures import portray

    portrait = portray(name, **options)
    if not json:
        _print_text(name, entry)
        _print_picture(portrait)
    if out is not None:
        _write(portrait, out)
        if not json:
            OUT.print(f"\nPicture: {out}")


def _parse(options: list[str], entry: Entry, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for item in options:
        key, equals, value = item.partition("=")
        if not equals:
            raise ArgumentError(
                "--option", expected="KEY=VALUE", got=item, remedy=f"Write --option {item}=…"
            )
        if key not in entry.options():
            raise UnknownNameError.of(f"option of {name}", key, entry.options())
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[key] = value
    return parsed


def _print_text(name: str, entry: Entry) -> None:
    OUT.print(Text(name, "bold cyan"), Text(entry.summary), sep="  ")
    OUT.print()
    document = inspect.getdoc(entry.factory) or ""
    OUT.print(Text(document.split(">>>")[0].replace("``", "").strip()))
    OUT.print()
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    claims, citation = entry.claims, entry.citation
    facts.add_row("sites", ", ".join(claims.sites) or "none")
    kind = "relative" if claims.relative else "absolute"
    facts.add_row("claims", kind + (", trainable" if claims.trainable else ", no parameters"))
    facts.add_row("past its length", claims.extrapolates)
    facts.add_row("cost", claims.cost)
    for option, parameter in entry.options().items():
        facts.add_row("option", f"{option} = {parameter.default!r}")
    if citation is not None:
        source = f"{citation.authors} {citation.year}. {citation.title}. {citation.url}"
        facts.add_row("cite", source)
    OUT.print(facts)


def _print_picture(portrait: Portrait) -> None:
    """The decay as bars; on a terminal with colours a heat map before it, in half blocks."""
    size = min(portrait.matrix.shape[-1], max(16, (OUT.width - 4) // 2), 48)
    matrix = portrait.matrix[0, :size, :size]
    most = max(matrix.abs().max().item(), 1e-9)
    many = portrait.matrix.shape[0] > 1
    OUT.print()
    OUT.print(Text(portrait.title.capitalize(), "dim"))
    if OUT.color_system is not None:
        which = "head 1, " if many else ""
        scale = f"from {-most:.3g} (red) to {most:.3g} (blue)"
        OUT.print(Text(f"  {which}query down, key across, {scale}", "dim"))
        for row in range(0, size, 2):
            line = Text("  ")
            for column in range(size):
                upper = _colour(matrix[row, column].item() / most)
                below = matrix[row + 1, column].item() / most if row + 1 < size else 0.0
                line.append("▀", Style(color=upper, bgcolor=_colour(below)))
            OUT.print(line)
    OUT.print(Text("  mean by tokens back, 0 first", "dim"))
    for head in range(portrait.decay.shape[0]):
        values = portrait.decay[head, :size]
        low, high = values.min().item(), values.max().item()
        span = max(high - low, 1e-9)
        bars = "".join(BARS[round((v - low) / span * 7)] for v in values.tolist())
        label = f"  head {head + 1} " if many else "  "
        OUT.print(Text.assemble((label, "dim"), bars, (f"  {low:.3g} … {high:.3g}", "dim")))
    if portrait.learned:
        OUT.print(Text("  These are initial values, which training changes.", "dim"))


def _colour(share: float) -> str:
    """White at 0, towards red below and blue above, for shares from -1 to 1."""
    full = (178, 24, 43) if share < 0 else (33, 102, 172)
    weight = min(1.0, abs(share))
    red, green, blue = (round(247 + (end - 247) * weight) for end in full)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _write(portrait: Portrait, out: Path) -> None:
    if out.suffix not in FORMATS:
        raise ArgumentError(
            "--out",
            expected=f"a file ending in {', '.join(FORMATS)}",
            got=out.name,
            remedy=f"Write {out.with_suffix('.png').name}, for example.",
        )
    import vl_convert

    from posenc.lab.pictures import draw
    from posenc.storage import write_bytes

    spec = draw(portrait)
    if out.suffix == ".png":
        content = vl_convert.vegalite_to_png(spec, scale=2)
    elif out.suffix == ".svg":
        content = vl_convert.vegalite_to_svg(spec).encode()
    else:
        content = vl_convert.vegalite_to_html(spec, bundle=True).encode()
    write_bytes(out, content)
