"""Facts about a method: its docstring in sections, parameter counts, supported backends."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from griffe import Docstring, parse_google
from griffe import DocstringSectionKind as Kind
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc.attention.backends.common.base import Refusal
from posenc.attention.call import Call
from posenc.attention.dispatch import BACKENDS
from posenc.encoding.entry import Entry
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create, create_layers

SIZES = {"dim": 512, "heads": 8, "head_dim": 64, "max_length": 512}
"""The model that parameters are counted in."""

DEVICES = ("cpu", "cuda")
"""Kinds of device that backends are asked about."""

TOKENS = 48
WINDOW = 7
"""Tokens, or cells a side of an image, that backends are asked about."""

SITES = {
    "embedding": ("Embeddings", "They change the token vectors before the first block, or each."),
    "query_key": ("Queries and keys", "They transform queries and keys before their product."),
    "score": ("Scores", "They add to the attention logits, or replace them."),
    "value": ("Values", "They transform values and outputs, or add to outputs."),
    "": ("None", "What a model knows of positions without an encoding."),
}
"""Sites: the heading of the group of methods, and a sentence on them."""


@dataclass(frozen=True)
class DocstringSections:
    """A docstring in its sections.

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
    def of(cls, method: object) -> DocstringSections:
        """The docstring of a class or function."""
        docstring = Docstring(inspect.getdoc(method) or "")
        sections = parse_google(docstring, warnings=False)
        values: defaultdict[Kind, list[Any]] = defaultdict(list)
        for section in sections:
            values[section.kind].extend(
                [section.value] if section.kind is Kind.text else section.value
            )
        text, prompt, example = "\n\n".join(values[Kind.text]).partition(">>>")
        described, *reference = re.split(r"^References?:", text, flags=re.MULTILINE)
        summary, *body = re.split(r"\n\s*\n", described.strip())
        return cls(
            summary=_flow(summary),
            body=tuple(
                block if block.startswith(" ") or "\n    " in block else _flow(block)
                for block in body
            ),
            arguments=tuple((a.name, _flow(a.description)) for a in values[Kind.parameters]),
            raises=tuple((str(e.annotation), _flow(e.description)) for e in values[Kind.raises]),
            reference=_flow(" ".join(reference)),
            example=f"{prompt}{example}".rstrip(),
        )


@dataclass(frozen=True)
class Sheet:
    """Facts about a method beyond its entry.

    Args:
        name, entry: in the registry.
        document: its docstring.
        parameters: of each layer of a model of ``SIZES``.
        shared_parameters: shared by all layers.
        backends: those that support it on any machine, by device and then by ``"training"`` or
            ``"inference"``.
        refusals: reasons of the others in inference, by device and backend.
    """

    name: str
    entry: Entry
    document: DocstringSections
    parameters: int
    shared_parameters: int
    backends: Mapping[str, Mapping[str, tuple[str, ...]]]
    refusals: Mapping[str, Mapping[str, str]]

    @property
    def size(self) -> str:
        """Number of parameters, those that layers share counted once."""
        shared, per_layer = self.shared_parameters, self.parameters
        counts = [f"{shared:,} for all layers"] * bool(shared) + [f"{per_layer:,} a layer"] * bool(
            per_layer
        )
        return " and ".join(counts) or "0"

    def served(self, device: str) -> str:
        """The backends on a device, and where they are fewer, those in training."""
        inference, training = (self.backends[device][way] for way in ("inference", "training"))
        names = ", ".join(inference)
        return names if training == inference else f"{names}; in training {', '.join(training)}"

    @property
    def traits(self) -> list[str]:
        """Claims of the method, in a word or two each."""
        claims = self.entry.claims
        axes = "any number of" if claims.axes is None else " or ".join(map(str, claims.axes))
        return [
            "relative" if claims.relative else "absolute",
            f"{axes} {'axis' if claims.axes == (1,) else 'axes'}",
            "trainable" if claims.trainable else "no parameters",
            *(["causal only"] if claims.causal_only else []),
            *(["depends on the length"] if claims.length_dependent else []),
        ]


@cache
def sheet(name: str) -> Sheet:
    """The sheet of a method of the registry."""
    entry = ENCODINGS[name]
    first, second = (_count(name, entry, layers) for layers in (1, 2))
    backends: dict[str, dict[str, tuple[str, ...]]] = {device: {} for device in DEVICES}
    refusals = {}
    for device in DEVICES:
        for way in ("training", "inference"):
            reasons = _refusals(name, entry, device, training=way == "training")
            backends[device][way] = tuple(n for n, reason in reasons.items() if reason is None)
        refusals[device] = {n: reason for n, reason in reasons.items() if reason is not None}
    return Sheet(
        name=name,
        entry=entry,
        document=DocstringSections.of(entry.factory),
        parameters=second - first,
        shared_parameters=2 * first - second,
        backends=backends,
        refusals=refusals,
    )


def _count(name: str, entry: Entry, layers: int) -> int:
    """Parameters of the encodings of so many layers, each counted once."""
    with torch.device("meta"):
        encodings = create_layers(name, layers=layers, **SIZES, causal=entry.claims.serves(1))
    return sum({id(p): p.numel() for e in encodings for p in e.parameters()}.values())


def group(names: tuple[str, ...]) -> dict[str, list[str]]:
    """The methods of each site, a method of several sites with its first."""
    groups: dict[str, list[str]] = {site: [] for site in SITES}
    for name in names:
        groups[next(iter(ENCODINGS[name].claims.sites), "")].append(name)
    return {site: methods for site, methods in groups.items() if methods}


def _refusals(name: str, entry: Entry, device: str, *, training: bool) -> dict[str, str | None]:
    """Reason why each backend cannot serve a method, or None; the device need not exist."""
    claims, length = entry.claims, TOKENS if entry.claims.serves(1) else WINDOW**2
    shape = (1, SIZES["heads"], length, SIZES["head_dim"])
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        encoding = create(name, **SIZES, causal=claims.serves(1))
        layout = Layout.sequence(length) if claims.serves(1) else Layout.image(WINDOW, WINDOW)
        if not claims.serves(1) and not claims.serves(2):
            layout = layout.with_positions(torch.zeros(1, length, 3))
        observed = encoding.observe(torch.zeros(1, length, SIZES["dim"]), layout)
        grid = Grid.of(observed, causal=claims.serves(1))
        x = torch.zeros(shape)
        call = Call(x, x, x, grid, encoding)
        transform = encoding.value_transform()
        if transform is not None:
            call = call.with_values(*transform)
        refusals = {}
        for label in sorted(BACKENDS, key="reference".__eq__):  # the definition last
            backend = BACKENDS[label]
            problem = call.problem()
            with FakeTensorMode():  # shapes on a device that need not be there
                q, k, v = (
                    torch.empty(x.shape, device=device) for x in (problem.q, problem.k, problem.v)
                )
            plan = backend.plan(replace(problem, q=q, k=k, v=v))
            refusals[label] = plan.reason if isinstance(plan, Refusal) else None
        return refusals


def _flow(block: str) -> str:
    return " ".join(block.split())
