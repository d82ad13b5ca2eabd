"""Pages of encodings: the table of all, and one each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scripts.docs import measured, snippets, sources
from scripts.docs.markdown import MADE, paragraph, prose, table

from posenc.encoding.entry import CONTEXT
from posenc.lab.users import users
from posenc.lab.visualization.catalogue import SIZES, Sheet

PLACES = {"cpu": "on the CPU", "cuda": "on CUDA"}

WAYS = (
    ("posenc's attention", snippets.layer),
    ("Your own attention", snippets.tensors),
    ("transformers", snippets.transformers),
)
"""Code to paste: the name of a tab, and what writes it."""


def overview(sheets: Sequence[Sheet]) -> str:
    """The tables of all methods."""
    heads = ("method", "site", "axes", "traits", "past the trained length")
    promises = table(heads, ([link(told), *promise(told)] for told in sheets))
    everywhere = common(sheets)
    costs = table(
        ("method", "cost", "parameters", "on the CPU", "on CUDA", "source"),
        (
            (
                *(link(told), told.entry.claims.cost, told.size),
                *(others(told, device, everywhere) for device in PLACES),
                cited(told),
            )
            for told in sheets
        ),
    )
    return f"""{MADE}

# Methods

The {len(sheets)} methods of `posenc.create`, each with a page of its formula, picture, code and
claims. [Choose](../choose/index.md) says which to take; `posenc gallery` draws them all.

## What each promises

The laws in `posenc.testing` hold every method to these claims; the exceptions are on its own page.
*Relative*: shifting all positions alike changes nothing. *Axes*: numbers that a position may have.
*Causal only*: meaningless without a causal mask. *Depends on the length*: what happens between two
tokens depends on how many others there are.

{{.filtered}}
{promises}

## What each costs

B batch, H heads, Q queries, K keys, L tokens, D head width, C model width, N buckets. *Cost* is
work and memory beside plain attention's; *parameters* are those of {size()};
what layers share is counted once.
{" and ".join(f"`{name}`" for name in everywhere)} serve every method; *on the CPU* and
*on CUDA* are the other backends that can serve it there, whatever machine made this page; a table
that needs a gradient can go to fewer.
`triton` and `flex` have kernels for CUDA only.
`posenc.explain` says which one `backend="auto"` takes for a call of yours, on your machine.

{{.filtered}}
{costs}

```{{toctree}}
:hidden:

{chr(10).join(told.name for told in sheets)}
```
"""


def page(told: Sheet) -> str:
    """The page of one method."""
    blocks = [MADE, f"# {told.name}", prose(told.document.summary)]
    blocks += [block for text in told.document.body for block in paragraph(text)]
    blocks += [*picture(told), "## Code", *code(told), *arguments(told), *claimed(told)]
    blocks += section("Measured", measured.speed(told.name))
    blocks += section("In the lab", measured.learned(told.name))
    blocks += section("Used by", used_by(told.name))
    kept_out = sources.of_encoding(told.name)
    if kept_out:
        text = "Reports and traps of other code, each held by a test ([all](../about/bugs.md)):"
        blocks += section("What others got wrong", [text, "\n".join(kept_out)])
    return "\n\n".join([*blocks, *source(told), "[All methods](index.md)"]) + "\n"


def section(title: str, blocks: Sequence[str]) -> list[str]:
    """Blocks under a heading, or none."""
    return [f"## {title}", *blocks] if blocks else []


def picture(told: Sheet) -> list[str]:
    """The encoding's picture, drawn beside the page."""
    return [f"```{{raw}} html\n:file: pictures/{told.name}.html\n```"]


def code(told: Sheet) -> list[str]:
    """The three ways to use it, in tabs."""
    tabs = "\n".join(
        f":::{{tab-item}} {title}\n```python\n{write(told.name)}```\n:::" for title, write in WAYS
    )
    return [f"::::{{tab-set}}\n{tabs}\n::::", f"```pycon\n{told.document.example}\n```"]


def arguments(told: Sheet) -> list[str]:
    """Arguments of ``create`` and errors."""
    parameters = told.entry.parameters()
    texts = {
        name: text
        for names, text in told.document.arguments
        for name in names.replace(" ", "").split(",")
    }
    rows = [
        (
            f"`{name}`" + (" (of the model)" if name in CONTEXT else ""),
            "" if p.default is p.empty else f"`{p.default!r}`",
            prose(texts.get(name, "")),
        )
        for name, p in parameters.items()
    ]
    blocks = section("Arguments", [table(("argument", "default", "meaning"), rows)] if rows else [])
    if told.document.raises:
        raises = (f"- `{error}`: {prose(text)}" for error, text in told.document.raises)
        blocks += ["Raises:", "\n".join(raises)]
    return blocks


def claimed(told: Sheet) -> list[str]:
    """Claims in words, what they cost, and backends."""
    claims = told.entry.claims
    blocks = ["## Claims", "\n".join(f"- {trait}" for trait in told.traits)]
    if claims.exceptions:
        lines = (f"- `{law}`: {prose(reason)}" for law, reason in claims.exceptions.items())
        blocks += ["Laws of `posenc.testing` that it does not keep:", "\n".join(lines)]
    rows = [
        ("past the trained length", claims.extrapolates),
        ("cost", claims.cost),
        ("parameters", told.size),
        *((place, told.served(device)) for device, place in PLACES.items()),
    ]
    return [*blocks, table(("", ""), rows), *refusals(told)]


def used_by(name: str) -> list[str]:
    """Models and libraries with it."""
    known = users().get(name, [])
    return [", ".join(known) + "."] if known else []


def source(told: Sheet) -> list[str]:
    """Publication, and its BibTeX."""
    if told.entry.citation is None:
        return []
    entry = f"```bibtex\n{sources.bibtex(told.entry.citation)}\n```"
    return ["## Source", prose(told.document.reference), entry]


def refusals(told: Sheet) -> list[str]:
    """Why backends cannot serve it, but for those of another device."""
    places: dict[tuple[str, str], list[str]] = {}
    for device, reasons in told.refusals.items():
        for name, reason in reasons.items():
            if not reason.endswith(f"not on {device}"):
                places.setdefault((name, reason), []).append(PLACES[device])
    return [
        f"Not `{name}` {' or '.join(devices)}: {reason}."
        for (name, reason), devices in places.items()
    ]


def promise(told: Sheet) -> Iterable[str]:
    claims = told.entry.claims
    yield ", ".join(claims.sites).replace("_", "/") or "none"
    yield "any" if claims.axes is None else ", ".join(map(str, claims.axes))
    yield ", ".join(trait for trait in told.traits if not trait.endswith(("axis", "axes")))
    yield claims.extrapolates


def common(sheets: Iterable[Sheet]) -> list[str]:
    """Backends that serve every method on every device, training included."""
    served = [set(names) for told in sheets for d in PLACES for names in told.backends[d].values()]
    return sorted(set.intersection(*served))


def others(told: Sheet, device: str, everywhere: Sequence[str]) -> str:
    """Backends on a device but those that serve every method."""
    return ", ".join(x for x in told.backends[device]["inference"] if x not in everywhere)


def cited(told: Sheet) -> str:
    """A link to its publication, by authors and year."""
    citation = told.entry.citation
    return "" if citation is None else f"[{citation.authors} {citation.year}]({citation.url})"


def size() -> str:
    return (
        f"a model of width {SIZES['dim']} with {SIZES['heads']} heads of {SIZES['head_dim']} and "
        f"tables for {SIZES['max_length']} positions"
    )


def link(told: Sheet) -> str:
    return f"[`{told.name}`]({told.name}.md)"
