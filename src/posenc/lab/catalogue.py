"""All that can be told of a method: its docstring in sections, its size, the backends it has."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache

import torch

from posenc.attention.api import BACKENDS, explain
from posenc.encoding import Encoding
from posenc.entry import Entry
from posenc.errors import BackendRefusal
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create

__all__ = ["SITES", "SIZES", "Document", "Sheet", "group", "sheet"]

SIZES = {"dim": 512, "heads": 8, "head_dim": 64, "max_length": 512}
"""The model that parameters are counted in."""

TOKENS = 48
WINDOW = 7
"""Tokens, or cells a side of an image, that backends are asked about."""

SITES = {
    "embedding": ("Embeddings", "They change the token vectors before the first block, or each."),
    "query_key": ("Queries and keys", "They transform queries and keys before their product."),
    "score": ("Scores", "They add to the attention logits, or replace them."),
    "value": ("Values", "They add to the weighted sum of values."),
    "": ("None", "What a model knows of positions without an encoding."),
}
"""Where methods enter: the heading of a group of them, and what they have in common."""

HEADINGS = ("Args", "Raises", "Reference", "References")


@dataclass(frozen=True)
class Document:
    """A docstring of a method in its sections.

    Args:
        summary: its first sentence.
        body: the paragraphs after it, formulas and claims.
        arguments: what each argument is.
        raises: what each error is raised on.
        reference: the source, in words.
        example: with prompts.
    """

    summary: str
    body: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...]
    raises: tuple[tuple[str, str], ...]
    reference: str
    example: str

    @classmethod
    def of(cls, entry: Entry) -> Document:
        """The docstring of an entry's factory."""
        text, prompt, example = (inspect.getdoc(entry.factory) or "").partition(">>>")
        sections: dict[str, list[str]] = {"": []}
        found = sections[""]
        for block in re.split(r"\n\s*\n", text.strip()):
            heading, _, rest = block.partition(":")
            if heading in HEADINGS:
                found = sections.setdefault(heading.rstrip("s") + "s", [])
                block = rest
            found.append(block.strip("\n"))
        summary, *body = sections[""]
        return cls(
            summary=_flow(summary),
            body=tuple(
                block if block.startswith(" ") or "\n    " in block else _flow(block)
                for block in body
            ),
            arguments=_definitions(sections.get("Args", [])),
            raises=_definitions(sections.get("Raises", [])),
            reference=_flow(" ".join(sections.get("References", []))),
            example=f"{prompt}{example}".rstrip(),
        )


@dataclass(frozen=True)
class Sheet:
    """What is known of a method beyond its entry.

    Args:
        name: in the registry; entry: there.
        document: its docstring.
        parameters: in one layer of a model of ``SIZES``.
        shared: whether all layers of a model have one instance.
        training, inference: the backends that serve it on the CPU when gradients are wanted and
            when not, fastest first.
        refusals: why the others do not serve it in inference.
    """

    name: str
    entry: Entry
    document: Document
    parameters: int
    shared: bool
    training: tuple[str, ...]
    inference: tuple[str, ...]
    refusals: dict[str, str]

    @property
    def traits(self) -> list[str]:
        """Its claims, in a word or two each."""
        claims = self.entry.claims
        axes = "any number of" if claims.axes is None else " or ".join(map(str, claims.axes))
        found = ["relative" if claims.relative else "absolute"]
        found.append(f"{axes} {'axis' if claims.axes == (1,) else 'axes'}")
        found.append("trainable" if claims.trainable else "no parameters")
        if claims.causal_only:
            found.append("causal only")
        if claims.length_dependent:
            found.append("depends on the length")
        return found


@cache
def sheet(name: str) -> Sheet:
    """The sheet of a method of the registry."""
    entry = ENCODINGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = create(name, **SIZES, causal=entry.claims.serves(1))
    training, _ = _served(encoding, entry)
    with torch.no_grad():
        inference, refusals = _served(encoding, entry)
    return Sheet(
        name=name,
        entry=entry,
        document=Document.of(entry),
        parameters=sum(parameter.numel() for parameter in encoding.parameters()),
        shared=entry.sharing == "layers",
        training=training,
        inference=inference,
        refusals=refusals,
    )


def group(names: tuple[str, ...]) -> dict[str, list[str]]:
    """The methods of each site, a method of several sites with its first."""
    groups: dict[str, list[str]] = {site: [] for site in SITES}
    for name in names:
        groups[next(iter(ENCODINGS[name].claims.sites), "")].append(name)
    return {site: found for site, found in groups.items() if found}


def _served(encoding: Encoding, entry: Entry) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backends that take it, and why the others do not."""
    claims = entry.claims
    layout = Layout.sequence(TOKENS) if claims.serves(1) else Layout.image(WINDOW, WINDOW)
    if not claims.serves(1) and not claims.serves(2):
        layout = Layout.at(torch.nn.functional.pad(layout.positions, (1, 0)))
    heads, width = SIZES["heads"], SIZES["head_dim"]
    q, k, v = torch.zeros(3, 1, heads, layout.length, width).unbind(0)
    x = torch.zeros(1, layout.length, SIZES["dim"])
    grid = Grid.of(encoding.observe(x, layout), causal=claims.serves(1))
    refusals: dict[str, str] = {}
    for backend in BACKENDS:
        try:
            explain(q, k, v, grid, encoding, backend=backend)
        except BackendRefusal as refusal:
            refusals[backend] = str(refusal.got).partition("because ")[2]
    return tuple(name for name in BACKENDS if name not in refusals), refusals


def _flow(block: str) -> str:
    return " ".join(block.split())


def _definitions(blocks: list[str]) -> tuple[tuple[str, str], ...]:
    """``name: text`` entries of a section, whose further lines are indented."""
    text = inspect.cleandoc("\n" + "\n".join(blocks))
    entries = re.split(r"\n(?=\S)", text)
    split = (_flow(entry).partition(": ") for entry in entries if entry)
    return tuple((name, told) for name, _, told in split)
