"""``posenc list`` and ``posenc tasks``: all encodings, and all tasks of ``posenc compare``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from posenc.encoding.entry import Claims, Entry
from posenc.lab.cli.console import OUT, new_table, print_json
from posenc.lab.cli.options import Json, flag, option
from posenc.registry import ENCODINGS

if TYPE_CHECKING:
    from posenc.lab.experiments.tasks import TaskEntry

WIDE = 120
"""Terminal width from which each field has its own column."""


class Site(StrEnum):
    """Sites where position enters a Transformer."""

    embedding = "embedding"
    query_key = "query_key"
    score = "score"
    value = "value"


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
    }


def list_encodings(
    site: Annotated[Site | None, option("Only encodings with this site.", "any")] = None,
    axes: Annotated[
        int | None, option("Only encodings for this many axes: 1 for text, 2 for images.", "any")
    ] = None,
    causal: Annotated[
        bool | None,
        flag("--causal/--bidirectional", "Only encodings for causal or bidirectional attention."),
    ] = None,
    extrapolates: Annotated[
        str | None, option("Only encodings whose extrapolation note contains this.", "any")
    ] = None,
    json: Json = False,
) -> None:
    """List all encodings with their sites, effect, cost and source.

    Examples:

        posenc list

        posenc list --site score --json

        posenc list --axes 2 --bidirectional

        posenc list --causal --extrapolates any
    """

    def selected(claims: Claims) -> bool:
        return (
            (site is None or site.value in claims.sites)
            and (axes is None or claims.axes is None or axes in claims.axes)
            and (causal is not False or not claims.causal_only)
            and (causal is not True or claims.axes is None or 1 in claims.axes)
            and (extrapolates is None or extrapolates.lower() in claims.extrapolates.lower())
        )

    chosen = {name: entry for name, entry in ENCODINGS.items() if selected(entry.claims)}
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


def list_tasks(json: Json = False) -> None:
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
