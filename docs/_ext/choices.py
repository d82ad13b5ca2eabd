"""The table of all methods, to filter, from the registry and what was measured."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from languages import FOLDER, translate
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from posenc.encoding.entry import Entry
from posenc.lab.users import users
from posenc.registry import ENCODINGS

ROOT = Path(__file__).parents[2]
SITES = {
    "embedding": "token vectors",
    "query_key": "queries and keys",
    "score": "scores",
    "value": "values",
}
LENGTH, FAR = 2048, 16384
"""Tokens at which time and memory were measured."""

WORDS = {
    "holds": ("holds", "to images of any size"),
    "degrades": ("degrades", "fair", "poorly"),
    "breaks": ("breaks",),
    "ends": ("not at all",),
    "limited": ("to ",),
}
"""Verdict on inputs past the trained length, by the beginning of the sentence."""


def measured(quantity: str, length: int) -> dict[str, float]:
    """A quantity of attention in float32 by encoding, causal where it was measured so."""
    readings = json.loads((ROOT / "benchmarks/results/attention_amd.json").read_text())["readings"]
    chosen = [
        row
        for row in readings
        if (row["level"], row["contender"], row["length"], row["dtype"], row["batch"])
        == ("call", "posenc", length, "float32", 1)
        and row[quantity] is not None
    ]
    chosen.sort(key=lambda row: row["causal"])
    return {row["encoding"].partition("@")[0]: row[quantity] for row in chosen}


def verdicts() -> dict[str, str]:
    """Verdicts of the comparison on text."""
    with (ROOT / "docs/results/demo-summary.csv").open() as file:
        return {row["subject"]: row["verdict"] for row in csv.DictReader(file)}


def extrapolation(entry: Entry) -> str:
    """Claims of an entry past the trained length, in one of four words, or "open"."""
    claim = entry.claims.extrapolates.lower()
    for word, beginnings in WORDS.items():
        if claim.startswith(beginnings):
            return word
    return "open"


def rows() -> Iterator[dict[str, str]]:
    """A row a method: its values by column, and those that are filtered by."""
    times = measured("both_ratio", LENGTH)
    memory = measured("both_memory", FAR)
    found = verdicts()
    known = users()
    for name, entry in ENCODINGS.items():
        claims = entry.claims
        yield {
            "name": name,
            "site": ", ".join(SITES[site] for site in claims.sites) or "none",
            "axes": "any" if claims.axes is None else ", ".join(map(str, claims.axes)),
            "causal": "causal only" if claims.causal_only else "either",
            "extrapolates": extrapolation(entry),
            "claim": claims.extrapolates,
            "verdict": found.get(name, ""),
            "time": f"{times[name]:.2f}" if name in times else "",
            "memory": f"{memory[name] / 1e6:,.0f}" if name in memory else "",
            "used": ", ".join(known.get(name, [])),
        }


HEADS = {
    "name": "method",
    "site": "site",
    "axes": "axes",
    "causal": "mask",
    "extrapolates": "past the trained length",
    "verdict": "measured on text",
    "time": "time",
    "memory": "memory, MB",
    "used": "used by",
}
FILTERS = ("site", "axes", "causal", "extrapolates", "used")
CONTROLS = ("any", "a released model", "words", "# of # methods")
"""Words of the filters, which the script writes."""


class Choices(SphinxDirective):
    """``{choices}``: the table in the page's language, above it filters, which a script shows."""

    def run(self) -> list[nodes.Node]:
        head = "".join(f'<th scope="col">{self.word(text)}</th>' for text in HEADS.values())
        body = "".join(
            f"<tr>{''.join(self.cell(row, column) for column in HEADS)}</tr>" for row in rows()
        )
        columns = list(HEADS)
        words = html.escape(json.dumps({text: self.word(text) for text in CONTROLS}))
        table = (
            f'<div class="choices"><div class="scrolled" tabindex="0" role="group"'
            f' aria-label="{self.word("All methods")}"><table class="filtered table"'
            f' data-filters="{" ".join(str(columns.index(name)) for name in FILTERS)}"'
            f' data-given="{columns.index("used")}" data-words="{words}">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
        )
        return [nodes.raw("", table, format="html")]

    def word(self, text: str) -> str:
        """A word of the table in the language of the page."""
        return translate(text, self.env.docname)

    def cell(self, row: dict[str, str], column: str) -> str:
        """A cell; the method is the row's head, and links to its page.

        A claim is an English sentence, which Chinese pages leave to the method's page.
        """
        text = html.escape(row[column])
        if column == "name":
            root = "../" * self.env.docname.count("/")
            link = f'<a href="{root}methods/{text}.html"><code>{text}</code></a>'
            return f'<th scope="row">{link}</th>'
        shown = ", ".join(self.word(part) for part in text.split(", "))
        note = ""
        if column == "extrapolates" and not self.env.docname.startswith(FOLDER):
            note = f' title="{html.escape(row["claim"])}"'
        return f'<td data-column="{column}"{note}>{shown}</td>'


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("choices", Choices)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
