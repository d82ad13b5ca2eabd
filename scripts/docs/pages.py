"""All generated pages by their paths below docs/."""

from __future__ import annotations

from scripts.docs import extensions, methods, reference
from scripts.docs.markdown import MADE, listed, table

from posenc.attention import BACKENDS
from posenc.extension import EXTENSIONS
from posenc.lab.experiments.tasks import TASKS
from posenc.lab.visualization.catalogue import group, sheet
from posenc.registry import ENCODINGS
from posenc.testing import LAWS
from posenc.transformers.acceleration import FAMILIES as ACCELERATED

SITES = {
    "embedding": "token vectors",
    "query_key": "queries and keys",
    "score": "scores, and values of some",
    "value": "values and outputs",
    "": "nothing, the control",
}


def committed() -> dict[str, str]:
    """Pages that are read in the repository too."""
    sheets = [sheet(name) for name in ENCODINGS]
    return {"methods/index.md": methods.overview(sheets), "reference/names.md": names()}


def pages() -> dict[str, str]:
    """Every page."""
    return {
        **committed(),
        **{f"methods/{name}.md": methods.page(sheet(name)) for name in ENCODINGS},
        "extensions/index.md": extensions.index(),
        **{f"extensions/{name}.md": extensions.page(name, e) for name, e in EXTENSIONS.items()},
        **reference.pages(),
    }


def names() -> str:
    """The page of all names there are."""
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
            f"[accelerated models of transformers](../guides/accelerate.md), {len(ACCELERATED)}",
            listed(ACCELERATED),
        ),
        (f"laws, {len(LAWS)}", listed(LAWS)),
    ]
    return f"{MADE}\n\n# All names\n\n{table(('', ''), rows)}\n"
