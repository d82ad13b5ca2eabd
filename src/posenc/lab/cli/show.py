"""``posenc list``, ``tasks``, ``show`` and ``gallery``: encodings and tasks, listed and drawn."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from posenc.arguments import Interval, check
from posenc.encoding.entry import Claims, Entry
from posenc.errors import ArgumentError
from posenc.lab.cli.console import ERRORS, OUT, new_table, print_json
from posenc.lab.cli.options import ENCODING, SEVERAL_ENCODINGS, Json
from posenc.lab.users import is_used_by, users
from posenc.registration import parse_name, parse_options
from posenc.registry import ENCODINGS

if TYPE_CHECKING:
    from posenc.lab.experiments.tasks import TaskEntry
    from posenc.lab.visualization.panels import Curves, Heat, Profile

WIDE = 120
"""Terminal width from which each field has its own column."""


Site = Literal["embedding", "query_key", "score", "value"]
"""Sites where position enters a Transformer."""


def describe(name: str, entry: Entry) -> dict[str, Any]:
    """A registry entry as JSON values."""
    claims, citation = entry.claims, entry.citation
    return {
        "name": name,
        "summary": entry.summary,
        "sites": list(claims.sites),
        "relative": claims.relative,
        "axes": None if claims.axes is None else list(claims.axes),
        "trainable": claims.trainable,
        "causal_only": claims.causal_only,
        "length_dependent": claims.length_dependent,
        "extrapolates": claims.extrapolates,
        "cost": claims.cost,
        "options": {
            option: None if p.default is p.empty else p.default
            for option, p in entry.options().items()
        },
        "citation": None if citation is None else asdict(citation),
        "used_by": users().get(name, []),
    }


def list_encodings(
    *,
    site: Annotated[
        Site | None, Parameter(help="Only encodings with this site.", show_default="any")
    ] = None,
    axes: Annotated[
        int | None,
        Parameter(
            help="Only encodings for this many axes: 1 for text, 2 for images.", show_default="any"
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        Parameter(
            negative="--bidirectional",
            help="Only encodings for causal or bidirectional attention.",
            show_default="any",
        ),
    ] = None,
    extrapolates: Annotated[
        str | None,
        Parameter(
            help="Only encodings whose extrapolation note contains this.", show_default="any"
        ),
    ] = None,
    used_by: Annotated[
        str | None,
        Parameter(
            help="Only encodings of a model or library whose name contains this, however spelled.",
            show_default="any",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List all encodings with their sites, effect, cost and source.

    Examples:

        posenc list

        posenc list --site score --json

        posenc list --axes 2 --bidirectional

        posenc list --causal --extrapolates any

        posenc list --used-by wan
    """

    def selected(name: str, claims: Claims) -> bool:
        return (
            (used_by is None or is_used_by(name, used_by))
            and (site is None or site in claims.sites)
            and (axes is None or claims.axes is None or axes in claims.axes)
            and (causal is not False or not claims.causal_only)
            and (causal is not True or claims.axes is None or 1 in claims.axes)
            and (extrapolates is None or extrapolates.lower() in claims.extrapolates.lower())
        )

    chosen = {name: entry for name, entry in ENCODINGS.items() if selected(name, entry.claims)}
    if not chosen and not json:
        OUT.print("No encoding matches. Remove a filter, or run posenc list to see all.")
        return
    if json:
        print_json([describe(name, entry) for name, entry in chosen.items()])
        return
    OUT.print(_columns(chosen) if OUT.width >= WIDE else _entries(chosen))
    OUT.print(f"\n{len(chosen)} encodings. Run posenc show NAME for details.", style="dim")


def _columns(chosen: Mapping[str, Entry]) -> Table:
    """A table with one row per encoding and one column per field."""
    table = new_table()
    table.expand = True
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("site", no_wrap=True)
    table.add_column("effect", ratio=3)
    table.add_column("beyond training length", ratio=3)
    table.add_column("cost", ratio=2, min_width=18, overflow="fold")
    table.add_column("cite", no_wrap=True)
    for name, entry in chosen.items():
        claims = entry.claims
        sites = "\n".join(claims.sites) or "—"
        table.add_row(name, sites, entry.summary, claims.extrapolates, claims.cost, _cited(entry))
    return table


def _entries(chosen: Mapping[str, Entry]) -> Table:
    """A narrow table: name, sites and source beside the summary and extrapolation note."""
    table = new_table()
    table.add_column("name, site, source", no_wrap=True)
    table.add_column("effect; behaviour beyond the training length")
    for name, entry in chosen.items():
        source = Text.assemble(
            (name, "bold cyan"), f"\n{', '.join(entry.claims.sites) or '—'}\n{_cited(entry)}"
        )
        table.add_row(
            source, Text.assemble(entry.summary, (f"\n{entry.claims.extrapolates}", "dim"))
        )
        table.add_row()
    return table


def _cited(entry: Entry) -> str:
    citation = entry.citation
    return "—" if citation is None else f"{citation.authors} {citation.year}"


def list_tasks(*, json: Json = False) -> None:
    """List all tasks with their data, metric, expected result and default size.

    Examples:

        posenc tasks

        posenc compare --task copy --encodings rope,t5
    """
    from posenc.lab.experiments.tasks import TASKS

    listed = [_describe(name, entry) for name, entry in TASKS.items()]
    if json:
        print_json(listed)
        return
    for task in listed:
        OUT.print(Text.assemble((task["name"], "bold cyan"), "  ", task["summary"]))
        facts = new_table(header=False)
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for label in ("data", "metric", "expected"):
            facts.add_row(f"  {label}", Text(task[label]))
        defaults = task["defaults"]
        facts.add_row("  encodings", ", ".join(defaults["encodings"] + defaults["references"]))
        tested = ", ".join(map(str, defaults["test_lengths"]))
        facts.add_row(
            "  size",
            f"{defaults['steps']} steps of {defaults['batch']} at {defaults['train_length']} "
            f"{task['length_unit']}, tested at {tested}; width {defaults['width']}, "
            f"{defaults['layers']} layers, {defaults['heads']} heads",
        )
        for name, value in task["options"].items():
            facts.add_row("  option", f"{name} = {value!r}")
        OUT.print(facts)
        OUT.print()
    OUT.print(f"{len(listed)} tasks. Run posenc compare --task NAME.", style="dim")


def _describe(name: str, entry: TaskEntry) -> dict[str, Any]:
    """A task entry as JSON values."""
    defaults = entry.defaults
    return {
        "name": name,
        "summary": entry.summary,
        "data": entry.data,
        "metric": entry.metric,
        "expected": entry.expectation,
        "length_unit": entry.length_unit,
        "options": dict(entry.options),
        "defaults": vars(defaults)
        | {
            "encodings": list(defaults.encodings),
            "references": list(defaults.references),
            "test_lengths": list(defaults.test_lengths(defaults.train_length)),
        },
    }


BARS = "▁▂▃▄▅▆▇█"

WIDEST = 100
"""Maximum width of text in characters."""


def show(
    name: Annotated[
        str, Parameter(help="Encoding, as named by posenc list, or several joined by +."), ENCODING
    ],
    /,
    *,
    options: Annotated[
        list[str] | None,
        Parameter(
            name=("--option", "-o"),
            metavar="KEY=VALUE",
            help="Encoding option KEY=VALUE; repeatable.",
            show_default="none",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(help="Output file for the plot: .png, .svg or .html.", show_default="no file"),
    ] = None,
    bidirectional: Annotated[bool, Parameter(help="Without a causal mask.")] = False,
    length: Annotated[int, Parameter(help="Number of tokens in the plot, 2 to 512.")] = 48,
    json: Json = False,
) -> None:
    """Show the formula, options, claims and plot of an encoding.

    Examples:

        posenc show rope

        posenc show rope+alibi

        posenc show t5 --option buckets=8 --out t5.png
    """
    length = check("--length", Annotated[int, Interval(2, 512)], length, 48)
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
    *,
    out: Annotated[Path, Parameter(help="Output file (.html).")] = Path("posenc-gallery.html"),
    encodings: Annotated[
        str | None,
        Parameter(help="Encodings to draw, comma-separated.", show_default="all"),
        SEVERAL_ENCODINGS,
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
