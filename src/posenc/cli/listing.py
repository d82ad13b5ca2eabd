"""``posenc list``: every method."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from posenc.cli.console import OUT, print_json
from posenc.entry import Claims, Entry
from posenc.registry import ENCODINGS

__all__ = ["describe", "list_encodings"]


WIDE = 120
"""Characters a line from which on every fact has a column of its own."""


class Site(StrEnum):
    """Where position enters a Transformer."""

    embedding = "embedding"
    query_key = "query_key"
    score = "score"
    value = "value"


def describe(name: str, entry: Entry) -> dict[str, Any]:
    """All that the registry knows of a method, as plain JSON values."""
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
        "citation": None
        if citation is None
        else {
            "authors": citation.authors,
            "title": citation.title,
            "year": citation.year,
            "url": citation.url,
        },
    }


def list_encodings(
    site: Annotated[
        Site | None, typer.Option(show_default="any", help="Only methods with a part on this site.")
    ] = None,
    axes: Annotated[
        int | None,
        typer.Option(
            show_default="any", help="Only methods for so many axes: 1 for text, 2 for images."
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional", help="Only methods for causal attention; or for both sides."
        ),
    ] = None,
    extrapolates: Annotated[
        str | None,
        typer.Option(
            show_default="any",
            help="Only methods of which it is said so past their length; a few letters.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List every method: where it enters, what it does, what it costs, whom to cite.

    Examples:

        posenc list

        posenc list --site score --json

        posenc list --axes 2 --bidirectional

        posenc list --causal --extrapolates any
    """

    def wanted(claims: Claims) -> bool:
        return (
            (site is None or site.value in claims.sites)
            and (axes is None or claims.axes is None or axes in claims.axes)
            and (causal is not False or not claims.causal_only)
            and (causal is not True or claims.axes is None or 1 in claims.axes)
            and (extrapolates is None or extrapolates.lower() in claims.extrapolates.lower())
        )

    chosen = {name: entry for name, entry in ENCODINGS.items() if wanted(entry.claims)}
    if not chosen and not json:
        OUT.print("No method is all of that. Leave out an option; posenc list shows all.")
        return
    if json:
        print_json([describe(name, entry) for name, entry in chosen.items()])
        return
    OUT.print(_columns(chosen) if OUT.width >= WIDE else _entries(chosen))
    OUT.print(f"\n{len(chosen)} methods. posenc show NAME tells more of one.", style="dim")


def _columns(chosen: Mapping[str, Entry]) -> Table:
    """A line or more a method, a column a fact."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), expand=True)
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("site", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("past its length", ratio=3)
    table.add_column("cost", ratio=2, min_width=18, overflow="fold")
    table.add_column("cite", no_wrap=True)
    for name, entry in chosen.items():
        claims = entry.claims
        sites = "\n".join(claims.sites) or "—"
        table.add_row(name, sites, entry.summary, claims.extrapolates, claims.cost, _cited(entry))
    return table


def _entries(chosen: Mapping[str, Entry]) -> Table:
    """Some lines a method: its name, sites and source beside what it does and what to expect."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("name, site, source", no_wrap=True)
    table.add_column("what it does; past its training length")
    for name, entry in chosen.items():
        who = Text.assemble(
            (name, "bold cyan"), f"\n{', '.join(entry.claims.sites) or '—'}\n{_cited(entry)}"
        )
        table.add_row(who, Text.assemble(entry.summary, (f"\n{entry.claims.extrapolates}", "dim")))
        table.add_row()
    return table


def _cited(entry: Entry) -> str:
    citation = entry.citation
    return "—" if citation is None else f"{citation.authors} {citation.year}"
