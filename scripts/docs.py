"""Write what follows from the registries: pages of methods in docs/, and all names in their index.

``make docs`` runs it. With ``--check`` nothing is written; it fails where a page is not current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from posenc.attention import BACKENDS
from posenc.entry import CONTEXT
from posenc.experiments.tasks import TASKS
from posenc.extension import EXTENSIONS
from posenc.integrations.transformers import FAMILIES
from posenc.integrations.transformers.accelerate import FAMILIES as ACCELERATED
from posenc.registry import ENCODINGS
from posenc.testing import LAWS
from posenc.visualization.catalogue import SIZES, Sheet, group, sheet

DOCS = Path(__file__).parent.parent / "docs"
INDEX = DOCS / "reference" / "names.md"
BEGIN, END = "<!-- names: made by `make docs` -->\n", "<!-- end of names -->\n"
SITES = {
    "embedding": "token vectors",
    "query_key": "queries and keys",
    "score": "scores, and values of some",
    "": "nothing, the control",
}
PLACES = {"cpu": "on the CPU", "cuda": "on CUDA"}
OPTIONAL = ("fla",)
"""Backends of other packages' kernels for a few methods: pages do not say what these are not."""

MADE = "<!-- made by `make docs` from the registry: edit the docstring and the entry instead -->"


def pages() -> dict[str, str]:
    """Every page by its path from ``docs/``."""
    sheets = [sheet(name) for name in ENCODINGS]
    before, _, rest = INDEX.read_text().partition(BEGIN)
    index = f"{before}{BEGIN}\n{names()}\n\n{END}{rest.partition(END)[2]}"
    return {"methods/index.md": overview(sheets), "reference/names.md": index} | {
        f"methods/{told.name}.md": page(told) for told in sheets
    }


def names() -> str:
    """The table of all names there are."""
    written = [name for name, family in FAMILIES.items() if family.write is not None]
    groups = group(tuple(ENCODINGS))
    first = f"[encodings](../methods/index.md), {len(ENCODINGS)}"
    rows = [
        ("" if i else first, f"{SITES[site]}: {listed(groups[site])}")
        for i, site in enumerate(groups)
    ]
    rows += [
        (f"[extensions](../extensions/index.md), {len(EXTENSIONS)}", listed(EXTENSIONS)),
        (f"[tasks](../results/index.md), {len(TASKS)}", listed(TASKS)),
        (f"backends, {len(BACKENDS)}", listed(BACKENDS)),
        (
            f"[checkpoints of transformers](../guides/accelerate.md), {len(FAMILIES)}",
            f"{listed(FAMILIES)}; written too: {listed(written)}",
        ),
        (
            f"[accelerated models of transformers](../guides/accelerate.md), {len(ACCELERATED)}",
            listed(ACCELERATED),
        ),
        (f"laws, {len(LAWS)}", listed(LAWS)),
    ]
    return table(("", ""), rows)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def overview(sheets: Sequence[Sheet]) -> str:
    """The tables of all methods."""
    heads = ["method", "sites", "relative", "axes", "causal only", "trainable"]
    heads += ["depends on the length", "past its training length"]
    promises = table(heads, ([link(told), *promise(told)] for told in sheets))
    costs = table(
        ("method", "cost", "parameters", "on the CPU", "on CUDA", "source"),
        ([link(told), *cost(told)] for told in sheets),
    )
    return f"""{MADE}

# Methods

The {len(sheets)} methods of `posenc.create`, from what the registry knows of them. `posenc gallery`
draws them all; `posenc show NAME` draws one.

## What each promises

The laws in `posenc.testing` hold every method to these claims; the exceptions are on its own page.
*Relative*: shifting all positions alike changes nothing. *Axes*: numbers that a position may have.
*Causal only*: meaningless without a causal mask. *Depends on the length*: what happens between two
tokens depends on how many others there are.

{promises}

## What each costs

B batch, H heads, Q queries, K keys, L tokens, D head width, C model width, N buckets. *Cost* is
work and memory beside plain attention's; *parameters* are those of {size()};
what layers share is counted once.
*On the CPU* and *on CUDA* are the backends that can serve it there, whatever machine made this
page; a table that needs a gradient can go to fewer. `triton` and `flex` have kernels for CUDA only,
and so has `fla`: flash-linear-attention's, where it is installed, for whole causal sequences of
`forgetting`, `cable` and `path` in 16 bits.
`posenc.explain` says which one `backend="auto"` takes for a call of yours, on your machine.

{costs}

```{{toctree}}
:hidden:

{chr(10).join(told.name for told in sheets)}
```
"""


def page(told: Sheet) -> str:
    """The page of one method."""
    claims, citation, document = told.entry.claims, told.entry.citation, told.document
    blocks = [MADE, f"# {told.name}", told.entry.summary, document.summary]
    blocks += [indent(paragraph) for paragraph in document.body]
    parameters = told.entry.parameters()
    options = [(name, parameters[name]) for name in parameters]
    texts = {
        name: text
        for names, text in document.arguments
        for name in names.replace(" ", "").split(",")
    }
    if options:
        blocks.append("## Arguments")
        blocks.append(
            table(
                ("argument", "default", "meaning"),
                (
                    (
                        f"`{name}`" + (" (of the model)" if name in CONTEXT else ""),
                        "" if p.default is p.empty else f"`{p.default!r}`",
                        texts.get(name, ""),
                    )
                    for name, p in options
                ),
            )
        )
    if document.raises:
        raises = (f"- `{error}`: {text}" for error, text in document.raises)
        blocks += ["## Raises", "\n".join(raises)]
    blocks += ["## Claims", "\n".join(f"- {trait}" for trait in told.traits)]
    if claims.exceptions:
        blocks.append("Laws of `posenc.testing` that it does not keep:")
        lines = (f"- `{law}`: {reason}" for law, reason in claims.exceptions.items())
        blocks.append("\n".join(lines))
    rows = [("past its training length", claims.extrapolates)]
    rows += zip(("cost", "parameters", "on the CPU", "on CUDA", "source"), cost(told), strict=True)
    blocks.append(table(("", ""), rows))
    blocks += refusals(told)
    if citation is not None:
        blocks += ["## Source", document.reference]
    blocks += ["## Example", f"```pycon\n{document.example}\n```", "[All methods](index.md)"]
    return "\n\n".join(blocks) + "\n"


def refusals(told: Sheet) -> list[str]:
    """Why backends cannot serve it, but for those of another device."""
    places: dict[tuple[str, str], list[str]] = {}
    for device, reasons in told.refusals.items():
        for name, reason in reasons.items():
            if name not in OPTIONAL and not reason.endswith(f"not on {device}"):
                places.setdefault((name, reason), []).append(PLACES[device])
    return [
        f"Not `{name}` {' or '.join(devices)}: {reason}."
        for (name, reason), devices in places.items()
    ]


def promise(told: Sheet) -> Iterable[str]:
    claims = told.entry.claims
    yield ", ".join(claims.sites).replace("_", "/") or "none"
    yield mark(claims.relative)
    yield "any" if claims.axes is None else ", ".join(map(str, claims.axes))
    yield mark(claims.causal_only)
    yield mark(claims.trainable)
    yield mark(claims.length_dependent)
    yield claims.extrapolates


def cost(told: Sheet) -> Iterable[str]:
    citation = told.entry.citation
    yield told.entry.claims.cost
    yield told.size
    yield told.served("cpu")
    yield told.served("cuda")
    yield "" if citation is None else f"[{citation.authors} {citation.year}]({citation.url})"


def size() -> str:
    return (
        f"a model of width {SIZES['dim']} with {SIZES['heads']} heads of {SIZES['head_dim']} and "
        f"tables for {SIZES['max_length']} positions"
    )


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in lines
    )


def link(told: Sheet) -> str:
    return f"[`{told.name}`]({told.name}.md)"


def mark(claimed: bool) -> str:
    return "yes" if claimed else ""


def indent(paragraph: str) -> str:
    """A paragraph, or what is set in lines of its own as a block."""
    return f"```text\n{paragraph}\n```" if "\n" in paragraph else paragraph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if not current")
    check = parser.parse_args().check
    made = pages()
    stale = [name for name, text in made.items() if not is_current(DOCS / name, text)]
    left = [p for p in (DOCS / "methods").glob("*.md") if f"methods/{p.name}" not in made]
    if check:
        for name in [*stale, *(f"methods/{path.name}" for path in left)]:
            path = (DOCS / name).resolve().relative_to(DOCS.parent)
            print(f"{path} is not current. Remedy: make docs", file=sys.stderr)
        sys.exit(bool(stale or left))
    for name in stale:
        (DOCS / name).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / name).write_text(made[name])
    for path in left:
        path.unlink()
    print(f"docs: {len(made)} pages, {len(stale)} of them new or changed, {len(left)} removed")


def is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
