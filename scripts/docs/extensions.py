"""Pages of methods of extension: the table of all, and one each."""

from __future__ import annotations

from scripts.docs import sources
from scripts.docs.markdown import MADE, listed, paragraph, prose, table
from scripts.docs.methods import section

from posenc.extension import EXTENSIONS, Extension
from posenc.extension.entry import CONTEXT
from posenc.lab.visualization.catalogue import DocstringSections

TRAINING = {
    "none": "made to work without fine-tuning",
    "helps": "works without fine-tuning, better with a little",
    "needed": "needs fine-tuning",
}


def index() -> str:
    """The page of all methods of extension."""
    heads = ("method", "on", "fine-tuning", "`rope_type`", "expected")
    rows = (
        (
            f"[`{name}`]({name}.md)",
            listed(entry.on),
            entry.claims.training,
            f"`{entry.claims.transformers}`" if entry.claims.transformers else "",
            prose(entry.claims.expect),
        )
        for name, entry in EXTENSIONS.items()
    )
    names = "\n".join(EXTENSIONS)
    return f"""{MADE}

# Extensions

{len(EXTENSIONS)} methods stretch a trained encoding past its length. [Which extension](which.md)
to take depends on what you have; [what each costs](../results/stretching.md) was measured.

*Fine-tuning* after it is *needed*, or *helps* a method that works without, or is *none*: the method
is made to work without. `rope_type` is the name in transformers, where it has the method.

{{.filtered}}
{table(heads, rows)}

Methods join by `+`, such as `rerope+log_n`.

```{{toctree}}
:hidden:

which
{names}
```
"""


def page(name: str, entry: Extension) -> str:
    """The page of one method."""
    document, claims = DocstringSections.of(entry.function), entry.claims
    blocks = [MADE, f"# {name}", prose(f"{document.summary} {entry.summary}")]
    blocks += [block for text in document.body for block in paragraph(text)]
    blocks += ["## Code", f"```pycon\n{document.example}\n```", *used(name, entry)]
    texts = {n: text for names, text in document.arguments for n in names.split(", ")}
    rows = [
        (
            f"`{parameter}`",
            "" if p.default is p.empty else f"`{p.default!r}`",
            prose(texts.get(parameter, "")),
        )
        for parameter, p in entry.parameters().items()
        if parameter not in ("encoding", "model")
    ]
    blocks += section(
        "Arguments", [table(("argument", "default", "meaning"), rows)] if rows else []
    )
    traits = {
        "a factor of 1 changes nothing": claims.identity_at_one,
        "decoding with a cache across the trained length equals one pass": claims.decodes_as_whole,
        "nothing changes below the trained length": claims.short_unchanged,
        "relative encodings stay relative": claims.stays_relative,
    }
    rows = [(words, "yes" if holds else "no") for words, holds in traits.items()]
    rows += [
        ("fine-tuning", TRAINING[claims.training]),
        ("past the trained length", prose(claims.expect)),
    ]
    rows += [("cost", prose(claims.cost)), ("encodings", listed(entry.on))]
    rows += [("`rope_type` in transformers", f"`{claims.transformers}`")] * bool(
        claims.transformers
    )
    blocks += [
        "## Claims",
        table(("", ""), rows),
        "Measured beside all others: [stretching](../results/stretching.md).",
    ]
    kept_out = sources.of_extension(name)
    if kept_out:
        text = "Reports and traps of other code, each held by a test ([all](../about/bugs.md)):"
        blocks += section("What others got wrong", [text, "\n".join(kept_out)])
    if entry.citation is not None:
        bibtex = f"```bibtex\n{sources.bibtex(entry.citation)}\n```"
        blocks += ["## Source", prose(document.reference), bibtex]
    return "\n\n".join([*blocks, "[All extensions](index.md)"]) + "\n"


def used(name: str, entry: Extension) -> list[str]:
    """On the command line, and in place on a model of transformers."""
    factor = " --factor 4" if "factor" in entry.parameters() else ""
    required = [
        option
        for option, p in entry.options().items()
        if p.default is p.empty and option not in CONTEXT and option not in ("encoding", "model")
    ]
    options = "".join(f"@{option}=…" for option in required)
    command = f"posenc extend MODEL --method '{name}{options}'{factor} --text FILE --out DIR"
    return ["A checkpoint, measured before and after:", f"```console\n{command}\n```"]
