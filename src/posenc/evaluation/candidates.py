"""Candidates of a study: a model extended by each method, and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from posenc.codec import parse_options
from posenc.encoding import Encoding
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError, UnknownNameError
from posenc.evaluation.results import Claimed, Findings
from posenc.extension import (
    EXTENSIONS,
    Extension,
    Misfit,
    advice,
    applicable,
    extend_layers,
    segments,
)
from posenc.models.replacing import encodings_of, with_encodings, with_window

__all__ = [
    "ALL",
    "CUT",
    "SCALED",
    "WINDOW",
    "Candidate",
    "Method",
    "candidates_by",
    "decoder_candidates",
    "extended_by",
    "methods_for",
]

ALL = "all"

WINDOW, CUT, SCALED = "window", "cut", "scaled"
"""The baselines: attention, texts or the size of images cut to what was trained at."""

SHORT = 1024
"""Below so many trained tokens YaRN's defaults do not mean what they say."""

SHORT_YARN = "yarn@alpha=0.5@beta=4"

TEXT_TABLES = (
    *("interpolate@prefix=1", "hierarchical@prefix=1", "random_tail@prefix=1", "segments"),
    *("interpolate+log_n@prefix=1", "hierarchical+log_n@prefix=1"),
)
"""The methods of ``all`` for a table of positions in a text, whose first row is that of [CLS]."""

IMAGE_TABLES = (
    *("interpolate", "interpolate@antialias=True", "interpolate@mode=bilinear"),
    "interpolate@align=corners",
)
"""The methods of ``all`` for a table of positions in an image."""


@dataclass(frozen=True)
class Method:
    """A method with its options, as ``yarn``, ``yarn@alpha=0.5@beta=4`` or ``rerope+log_n``.

    Args:
        spec: as it was written.
        name: of the method, or several joined by ``+``.
        options: of these.
        notes: where its options come from, in sentences; maybe none.
    """

    spec: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, spec: str) -> Method:
        """The method called ``spec``.

        Raises:
            UnknownNameError: on a method or option that does not exist.
            ArgumentError: on a value out of its option's domain.
        """
        name, *changes = spec.split("@")
        parts = name.split("+")
        for part in parts:
            if part not in EXTENSIONS:
                raise UnknownNameError.of("method", part, [*EXTENSIONS, ALL])
        valid = {o: p for part in parts for o, p in EXTENSIONS[part].options().items()}
        return cls(spec, name, parse_options(changes, valid, of=name))

    @property
    def entries(self) -> list[Extension]:
        """The registered extensions that it joins."""
        return [EXTENSIONS[part] for part in self.name.split("+")]

    @property
    def of_model(self) -> bool:
        """Whether it changes how a model is run, rather than its encodings."""
        return any(entry.level == "model" for entry in self.entries)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model to be measured, or the reason why there is none.

    Args:
        key: the method as it was written, ``direct``, or ``window``.
        role: ``"method"`` or ``"baseline"``.
        method: None for the window.
        model: extended; its weights are shared with the original.
        refusal: why there is no model.
        advice: notes on the method at this length and factor.
        factor: by which its length grows; None: by the factor of the study.
        limit: the longest input it is given; longer ones are cut.
    """

    key: str
    role: str
    method: Method | None
    model: nn.Module | None
    refusal: str = ""
    advice: tuple[str, ...] = ()
    factor: float | None = None
    limit: int | None = None

    @property
    def trainable(self) -> bool:
        """Whether it can be fine-tuned."""
        return self.model is not None and (self.method is None or not self.method.of_model)

    @property
    def writable(self) -> bool:
        """Whether a checkpoint can hold it."""
        held = self.model is not None and self.method is not None and not self.method.of_model
        return self.role == "method" and held

    @property
    def findings(self) -> Findings:
        """The findings on it before it is measured."""
        return Findings(
            key=self.key,
            role=self.role,
            claims=() if self.method is None else tuple(map(_claimed, self.method.entries)),
            advice=self.advice,
            refusal=self.refusal,
            writable=self.writable,
            served=self.served,
        )

    @property
    def served(self) -> str:
        """The ``rope_type`` that transformers runs it as, or ``table``; empty: only posenc runs it.

        LongRoPE's says any division of frequencies.
        """
        if self.model is None or self.method is None or self.method.of_model:
            return ""
        if _only_table(encodings_of(self.model)[0]):
            return "table"
        if len(self.method.entries) == 1 and self.method.entries[0].claims.transformers:
            return self.method.entries[0].claims.transformers
        encoding = encodings_of(self.model)[0]
        divided = type(encoding.query_key) is Rope and encoding.query_key.divisors is not None
        return "longrope" if divided and encoding.score is None else ""


def methods_for(names: str, model: nn.Module, *, length: int) -> list[Method]:
    """The methods that a list of names joined by commas stands for; ``all``: every one that fits.

    At short trained lengths ``all`` has YaRN also with a ramp that fits them.

    Raises:
        UnknownNameError: on a method or option that does not exist.
        Misfit: on a method that does not fit the model's encoding.
        ArgumentError: when there is none.
    """
    listed = _listed(names)
    encoding = encodings_of(model)[0]
    fitting = applicable(encoding)
    if ALL in listed:
        every = [name for name in fitting if name != "direct"]
        if isinstance(encoding.embedding, Learned2d):
            every = list(IMAGE_TABLES)
        elif isinstance(encoding.embedding, Learned):
            every = list(TEXT_TABLES)
        listed = every + [n for n in listed if n != ALL]
        if "yarn" in fitting and length < SHORT and SHORT_YARN not in listed:
            listed.append(SHORT_YARN)
    if not listed:
        raise ArgumentError(
            "method", expected="a method", got="none", remedy=f"Here fit: {', '.join(fitting)}."
        )
    return [Method.parse(name) for name in dict.fromkeys(listed)]


def decoder_candidates(
    model: nn.Module, methods: Sequence[Method], *, factor: float, length: int, strict: bool
) -> Iterator[Candidate]:
    """The original, a plain sliding window, and the model stretched by each method.

    Args:
        model: as trained.
        methods: what to try.
        factor, length: how far, from where.
        strict: raise what a method refuses, instead of reporting it.

    Raises:
        ArgumentError: with ``strict``, what does not fit.
    """
    note = f"The model as trained, with attention cut to the last {length} tokens. It ties most "
    note += "methods on local text, so that loss alone does not show use of the far past."
    yield Candidate(
        "direct",
        "baseline",
        Method.parse("direct"),
        model,
        advice=("The model as trained, at positions that it has not seen.",),
    )
    yield Candidate(WINDOW, "baseline", None, with_window(model, length), advice=(note,))

    def make(method: Method) -> Candidate:
        return extended_by(model, method, factor=factor, length=length)

    yield from candidates_by(model, methods, make, strict=strict)


def candidates_by(
    model: nn.Module,
    methods: Sequence[Method],
    make: Callable[[Method], Candidate],
    *,
    strict: bool,
) -> Iterator[Candidate]:
    """The model extended by each method, or the reason why it cannot be."""
    for method in methods:
        if method.spec == "direct":
            continue
        try:
            yield make(method)
        except ArgumentError as error:
            if strict:
                if isinstance(error, Misfit):
                    fitting = ", ".join(applicable(encodings_of(model)[0]))
                    error.remedy = f"These fit: {fitting}."
                raise
            reason = f"{error.argument}: expected {error.expected}, got {error.got}"
            yield Candidate(method.spec, "method", method, None, reason)


def _claimed(entry: Extension) -> Claimed:
    claims, cite = entry.claims, entry.citation
    return Claimed(
        summary=entry.summary,
        expect=claims.expect,
        training=claims.training,
        cost=claims.cost,
        transformers=claims.transformers,
        decodes_as_whole=claims.decodes_as_whole,
        cite="" if cite is None else f"{cite.authors} {cite.year}, {cite.title}",
    )


def _only_table(encoding: Encoding) -> bool:
    """Whether positions are those of a learned table alone, which any checkpoint can hold."""
    return [type(part) for part in encoding.parts()] in ([Learned], [Learned2d])


def extended_by(model: nn.Module, method: Method, *, factor: float, length: int) -> Candidate:
    """A model of text stretched by one method.

    Raises:
        ArgumentError: when it does not fit.
    """
    if method.of_model:
        if method.name != "segments":
            raise ArgumentError(
                "method",
                expected="segments alone, or methods that change encodings",
                got=method.name,
                remedy="Segments are read by the model as it is.",
            )
        return Candidate(
            method.spec, "method", method, segments(model, length=length, **method.options)
        )
    encodings = encodings_of(model)
    stretched = extend_layers(
        encodings, method.name, factor=factor, length=length, **method.options
    )
    known = advice(encodings[0], method.name, factor=factor, length=length, **method.options)
    twin = with_encodings(model, stretched)
    return Candidate(method.spec, "method", method, twin, advice=(*method.notes, *known))


def _listed(names: str) -> list[str]:
    """Names between commas that stand in no brackets."""
    listed, depth = [""], 0
    for letter in names:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            listed.append("")
        else:
            listed[-1] += letter
    return [name.strip() for name in listed if name.strip()]
