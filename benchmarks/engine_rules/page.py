"""Tables of verdicts by engine, family and method: ``docs/results/engines.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.engine_rules.verdicts import SYMBOLS
from benchmarks.measuring import RESULTS, table

from posenc.transformers.engines import ENGINES

CELLS = {
    "=": "=",
    "s": "no scaling",
    "b": "no base",
    "l": "as longer",
    "f": "other",
    "g": "gain",
    "w": "features",
    "r": "refused",
    "u": "?",
    "!": "**!**",
    " ": "",
}
"""Verdicts in a table."""

SAVED = {"extended": "extend", "plain": "transformers"}
"""Writers of a config."""


def page() -> str:
    """A part an engine: its release, how many cells have which verdict, and a table of them."""
    results = json.loads((RESULTS / "engine_rules.json").read_text())
    methods, engines = results["methods"], results["engines"]
    return "\n".join(_part(name, engines[name], methods) for name in ENGINES if name in engines)


def _part(name: str, engine: Mapping[str, Any], methods: list[str]) -> str:
    letters = "".join(line for family in engine["cells"].values() for line in family.values())
    counts = Counter(letters.replace(" ", "")).most_common()
    title = f"## {name} {engine['release']}\n\n{engine['date']}: "
    if set(letters) <= {"=", " "}:
        return f"{title}{len(letters.replace(' ', '')):,} cells, all equal.\n"
    told = ", ".join(f"{count:,} {SYMBOLS[letter]}" for letter, count in counts)
    head = ["families", "written by", *(f"`{method}`" for method in methods)]
    rows = [
        [", ".join(families), writers, *(CELLS[one] for one in line)]
        for (writers, line), families in _grouped(engine["cells"], len(methods)).items()
    ]
    return f"{title}{told}.\n\n{table(head, rows)}"


def _grouped(
    cells: Mapping[str, Mapping[str, str]], methods: int
) -> dict[tuple[str, str], list[str]]:
    """Families by writers and verdicts; both writers in a row where they have the same."""
    groups: dict[tuple[str, str], list[str]] = {}
    for family, by_saved in cells.items():
        plain = by_saved.get("plain", " " * methods)
        extended = by_saved.get("extended", " " * methods)
        rows = {"plain": plain, "extended": extended}
        if extended[1:] == plain[1:]:
            groups.setdefault(("both", plain), []).append(family)
            continue
        for saved, line in rows.items():
            groups.setdefault((SAVED[saved], line), []).append(family)
    return groups
