"""Candidates of a study: a model extended by each method, and the baselines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from posenc.encoding import Encoding
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.errors import ArgumentError
from posenc.extension import (
    EXTENSIONS,
    Extension,
    NotApplicable,
    advice,
    applicable,
    extend,
    segments,
)
from posenc.lab.evaluation.images import BySize, Size
from posenc.lab.evaluation.results import Claimed, Findings
from posenc.registration import parse_name
from posenc.transformers.live import LiveDecoder, LiveImages, LiveModel

ALL = "all"

WINDOW, CUT, SCALED = "window", "cut", "scaled"
"""Baselines: attention, texts or images limited to the trained length or size."""

SHORT = 1024
"""Trained lengths below which ``all`` also tries what methods have for short ones."""


@dataclass(frozen=True)
class Method:
    """An extension method with options, such as ``yarn@alpha=0.5@beta=4`` or ``rerope+log_n``.

    Args:
        spec: as written.
        name: of the method, or several joined by ``+``.
        options: of these.
        notes: sentences on the origin of its options.
    """

    spec: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, spec: str) -> Method:
        """Parse a method.

        Raises:
            UnknownNameError: for an unknown method or option.
            ArgumentError: for a value outside its option's domain.
        """
        parsed = parse_name(EXTENSIONS, spec, names=(ALL,))
        return cls(spec, parsed.name, parsed.options)

    @property
    def entries(self) -> list[Extension]:
        """The registered extensions that it joins."""
        return [EXTENSIONS[part] for part in self.name.split("+")]

    @property
    def of_model(self) -> bool:
        """True if it changes how a model is run, not its encodings."""
        return any(entry.level == "model" for entry in self.entries)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model to measure, or the reason why there is none.

    Args:
        key: the method as written, or the name of a baseline.
        model: the extended model, which shares weights with the original.
        method: None for a baseline other than ``direct``.
        refusal: why there is no model.
        advice: notes on the method at this length and factor.
        limit: maximum input length; longer inputs are cut.
    """

    key: str
    model: nn.Module | None
    method: Method | None = None
    refusal: str = ""
    advice: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def trainable(self) -> bool:
        """True if it can be fine-tuned."""
        return self.model is not None and (self.method is None or not self.method.of_model)

    @property
    def writable(self) -> bool:
        """True if a checkpoint can hold it."""
        if self.model is None or self.method is None or self.method.name == "direct":
            return False
        return not self.method.of_model

    @property
    def findings(self) -> Findings:
        """The findings on it before it is measured."""
        baseline = self.method is None or self.method.name == "direct"
        return Findings(
            key=self.key,
            role="baseline" if baseline else "method",
            claims=() if self.method is None else tuple(map(_claimed, self.method.entries)),
            advice=self.advice,
            refusal=self.refusal,
            writable=self.writable,
            served=getattr(self.model, "served", ""),
        )


def methods_for(names: str, model: LiveModel, *, length: int) -> list[Method]:
    """The methods in a comma-separated list; ``all`` stands for every one that fits.

    Raises:
        UnknownNameError: for an unknown method or option.
        ArgumentError: for an empty list.
    """
    # commas in brackets are part of an option
    listed = [name.strip() for name in re.split(r",(?![^(\[]*[)\]])", names) if name.strip()]
    encoding = model.trained_encoding()
    fitting = applicable(encoding)
    if ALL in listed:
        if isinstance(encoding.embedding, Learned2d):
            every = _trials("image_table", fitting)
        elif isinstance(encoding.embedding, Learned):
            every = _trials("text_table", fitting)
        else:
            every = [name for name in fitting if name != "direct"]
        short = _trials("short", fitting) if length < SHORT else []
        listed = [*every, *(name for name in listed if name != ALL), *short]
    if not listed:
        raise ArgumentError(
            "method", expected="a method", got="none", remedy=f"Here fit: {', '.join(fitting)}."
        )
    return [Method.parse(name) for name in dict.fromkeys(listed)]


def _trials(kind: str, names: Sequence[str]) -> list[str]:
    """Ways to try methods on models of a kind; see ``Extension.trials``."""
    return [f"{name}{way}" for name in names for way in EXTENSIONS[name].trials.get(kind, ())]


def text_candidates(
    model: LiveModel, methods: Sequence[Method], *, factor: float, length: int, strict: bool
) -> Iterator[Candidate]:
    """The original, one limited to the trained length, and the model extended by each method.

    A model with a table of positions cannot be run beyond it; its tables get rows for the new
    length.

    Args:
        model: as trained.
        methods: to extend it by.
        factor, length: extension of the trained length.
        strict: raise the error of a method that does not fit, instead of reporting it.

    Raises:
        ArgumentError: with ``strict``, for a method that does not fit.
    """
    if model.table is None:
        unseen = "The model as trained, at positions that it has not seen."
        yield Candidate("direct", model, Method.parse("direct"), advice=(unseen,))
    if model.table is not None or not isinstance(model, LiveDecoder):
        yield cut(model, length)
    elif model.rotates and not model.windowed:
        window = (
            f"The model as trained, with attention cut to the last {length} tokens. It ties most "
            "methods on local text, so that loss alone does not show use of the far past."
        )
        yield Candidate(WINDOW, model.cut(length), advice=(window,))

    def make(method: Method) -> Candidate:
        if model.table is None:
            return extended_by(model, method, factor=factor, length=length)
        prefix = int(method.options.get("prefix", 0))
        grown = (round(length * factor) - prefix) / (length - prefix)
        return extended_by(model, method, factor=grown, length=length)

    yield from _candidates_by(methods, make, trained=model.trained_encoding, strict=strict)


def cut(model: LiveModel, length: int) -> Candidate:
    """A model as trained, on texts of its trained length: causal ones in segments."""
    note = f"The model as trained, given {length} tokens and no more."
    if isinstance(model, LiveDecoder):
        return Candidate(CUT, segments(model, length=length), advice=(note,))
    return Candidate(CUT, model, limit=length, advice=(note,))


def _candidates_by(
    methods: Sequence[Method],
    make: Callable[[Method], Candidate],
    *,
    trained: Callable[[], Encoding],
    strict: bool,
) -> Iterator[Candidate]:
    """A model extended by each method, or the reason why it cannot be.

    Args:
        trained: the encoding of the model, of which those that fit are told.
    """
    for method in methods:
        if method.spec == "direct":
            continue
        try:
            yield make(method)
        except ArgumentError as error:
            if isinstance(error, NotApplicable):
                fitting = ", ".join(applicable(trained()))
                error.remedy = f"These fit: {fitting}."
            if strict:
                raise
            reason = f"{error.argument}: expected {error.expected}, got {error.got}"
            yield Candidate(method.spec, None, method, reason)


def extended_by(model: LiveModel, method: Method, *, factor: float, length: int) -> Candidate:
    """A model of text extended by one method.

    Raises:
        ArgumentError: if it does not fit.
    """
    if method.of_model:
        if method.name != "segments":
            raise ArgumentError(
                "method",
                expected="segments alone, or methods that change encodings",
                got=method.name,
                remedy="Segments are read by the model as it is.",
            )
        options = dict(method.options)
        if not isinstance(model, LiveDecoder):
            options = {"combine": "middle", "overlap": length // 4} | options
        return Candidate(method.spec, segments(model, length=length, **options), method)
    context: dict[str, Any] = {"factor": factor, "length": length}
    noted = advice(model.trained_encoding(), method.name, **context, **method.options)
    extended = model.extended(method.name, **context, options=method.options)
    return Candidate(method.spec, extended, method, advice=(*method.notes, *noted))


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


def image_candidates(
    model: LiveImages, methods: Sequence[Method], *, cells: Sequence[Size]
) -> Iterator[Candidate]:
    """A model of images scaled to its trained size, and with a table for each size by each method.

    Args:
        model: as trained.
        methods: to extend it by.
        cells: the sizes in cells, the trained one first.

    Raises:
        ArgumentError: for a method that is not for images.
    """
    patch = model.patch
    height, width = (patch * side for side in cells[0])
    note = f"The model as trained, shown every image at {height} by {width} pixels."
    yield Candidate(SCALED, model, limit=max(height, width), advice=(note,))

    def make(method: Method) -> Candidate:
        models = {
            (patch * size[0], patch * size[1]): model.extended(
                method.name, factor=None, length=None, options={**method.options, "size": size}
            )
            for size in cells
        }
        return Candidate(method.spec, BySize(models), method)

    yield from _candidates_by(methods, make, trained=model.trained_encoding, strict=True)


def goal_cells(model: LiveImages, methods: Sequence[Method], *, factor: float) -> Size:
    """Size in cells of the tables that the methods make, by their ``size`` or by ``factor``.

    Raises:
        ArgumentError: if sizes differ, or a method makes no table.
    """
    sizes: set[Size] = set()
    for method in methods:
        if any("learned2d" not in entry.on for entry in method.entries):
            raise ArgumentError(
                "method",
                expected="a method for a table of positions in an image",
                got=method.name,
                remedy="Use interpolate, which makes one for any size.",
            )
        extended = extend(model.trained_encoding(), method.name, factor=factor, **method.options)
        assert isinstance(extended.embedding, Learned2d)
        height, width = extended.embedding.table.shape[:2]
        sizes.add((height, width))
    if len(sizes) != 1:
        raise ArgumentError(
            "method",
            expected="methods for one size of images",
            got=", ".join(f"{height}×{width} cells" for height, width in sorted(sizes)),
            remedy="Give size=(…) to all of them, or to none.",
        )
    return sizes.pop()
