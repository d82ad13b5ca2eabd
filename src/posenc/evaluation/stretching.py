"""Stretching a model by several methods, and measuring each, before and after fine-tuning."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

import torch
from torch import nn

from posenc.errors import ArgumentError
from posenc.evaluation.candidates import CUT, Contender, Method, assemble
from posenc.evaluation.choosing import choose
from posenc.evaluation.finetuning import Tuning, finetuned
from posenc.evaluation.images import Images, ImageSource, Size
from posenc.evaluation.position_tables import assemble_images, assemble_tables, goal_cells
from posenc.evaluation.results import Claimed, Findings, Study
from posenc.evaluation.suites.images import BySize, ImageRuler, images_for, sides
from posenc.evaluation.suites.masked import MaskedRuler
from posenc.evaluation.suites.needles import ByteNeedles
from posenc.evaluation.suites.next_token import Gauge, Ruler, lengths_to
from posenc.evaluation.suites.retrieval import RetrievalRuler
from posenc.evaluation.texts import Text
from posenc.extension import Extension
from posenc.models import Decoder, Encoder, ImageEncoder, MaskedLM, VisionTransformer
from posenc.training.machine import describe_device, platform_name

__all__ = ["Material", "Outcome", "Subject", "Tell", "evaluate", "stretch"]

Material = Text | ImageSource
"""What models are measured on."""

Tell = Callable[[str, int, int], None]
"""Called with what is done now, how many models are done, and how many there are."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model.

    Args:
        name: of its checkpoint.
        family: ``model_type``.
        model: a ``Decoder``; an ``Encoder`` or a ``MaskedLM`` with a learned table of positions;
            an ``ImageEncoder`` or a ``VisionTransformer`` with one.
        length: in tokens, that it was trained at; of images the longer side in pixels.
    """

    name: str
    family: str
    model: nn.Module
    length: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out.

    Args:
        study: what was found.
        model: the chosen one, stretched and, if asked for, fine-tuned; None: there is none.
        method: by which.
        factor: how far.
    """

    study: Study
    model: nn.Module | None
    method: Method | None
    factor: float


def evaluate(
    subject: Subject,
    material: Material,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    tell: Tell = lambda what, done, total: None,
) -> Study:
    """Measure a model as it is.

    An encoder is given no more than its table has positions for. A model of images has its table
    interpolated for larger ones, as transformers does if asked to.

    Args:
        subject: what.
        material: to read, or to see.
        lengths: of contexts; half, once and twice its own by default. Of images sides in pixels.
        seed: of needles, words and masks.
        tell: told of progress.

    Raises:
        DataError: when the text is too short, or images cannot be read.
        ArgumentError: on sizes that the model cannot be shown.
    """
    began = time.perf_counter()
    model, measured, limit, key = subject.model, subject.model, None, "direct"
    if isinstance(model, ImageEncoder | VisionTransformer):
        cells = _cells_for(model, lengths)
        gauge: Gauge = _image_ruler(subject, material, cells)
        *_, contender = assemble_images(model, [Method.parse("interpolate")], cells=cells)
        assert contender.model is not None
        measured, key = contender.model, contender.key
    else:
        chosen = tuple(sorted(set(lengths))) if lengths else lengths_to(subject.length, 2.0)
        gauge = _ruler(subject, material, chosen, seed=seed)
        if not isinstance(model, Decoder):
            limit, key = subject.length, CUT
    tell("measuring", 0, 1)
    reading = gauge.measure(measured, limit=limit)
    tell("measured", 1, 1)
    found = Findings(key=key, role="baseline", untuned=reading)
    study = _study(subject, material, gauge, (found,), factor=1.0, seed=seed)
    return replace(study, seconds=time.perf_counter() - began)


def stretch(
    subject: Subject,
    material: Material,
    methods: Sequence[Method],
    *,
    factor: float,
    tuning: Tuning,
    seed: int = 0,
    always: bool = False,
    tell: Tell = lambda what, done, total: None,
) -> Outcome:
    """Stretch a model by each method, measure all, and choose one.

    One method is refused with an error where it does not fit; of several, those that do not fit
    are reported so. Measured beside them are the original, where it can be run, and the model as
    trained with its attention, its texts or its images cut to what it was trained at. Causal models
    may be fine-tuned, the baselines as all others.

    Args:
        subject: what.
        material: to read, or to see.
        methods: to stretch it by.
        factor: how far.
        tuning: of each; 0 steps for none.
        seed: of needles, words and masks.
        always: choose the best of several methods even where none gains anything over the model
            as it is.
        tell: told of progress.

    Raises:
        ArgumentError: when the only method does not fit, or diverges in fine-tuning, or a model
            that is not causal is to be fine-tuned.
        DataError: when the text is too short, or images cannot be read.
    """
    began = time.perf_counter()
    if tuning.steps and not isinstance(subject.model, Decoder):
        raise ArgumentError(
            "--finetune-steps",
            expected=f"0 for a {subject.family}",
            got=tuning.steps,
            remedy="Only models of the next token are fine-tuned here.",
        )
    contenders, gauge = _prepared(subject, material, methods, factor=factor, seed=seed)
    found: list[Findings] = []
    models: dict[str, nn.Module] = {}
    for done, contender in enumerate(contenders):

        def say(what: str, key: str = contender.key, done: int = done) -> None:
            tell(f"{key}: {what}", done, len(contenders))

        findings, model = _examine(contender, subject, material, gauge, tuning, say)
        found.append(findings)
        if model is not None:
            models[contender.key] = model
    tell("done", len(contenders), len(contenders))
    study = _study(subject, material, gauge, tuple(found), factor=factor, seed=seed)
    if tuning.steps:
        width = next(subject.model.parameters()).shape[-1]
        how = {
            "steps": tuning.steps,
            "positions": tuning.positions,
            "rate": tuning.rate_for(width),
            "seed": tuning.seed,
        }
        study = replace(study, finetune=how)
    chosen, reason = choose(study, tuned=bool(tuning.steps), always=always)
    study = replace(study, chosen=chosen, reason=reason, seconds=time.perf_counter() - began)
    winner = next((each for each in contenders if each.key == chosen), None)
    model = models.get(chosen or "")
    return Outcome(
        study,
        model.goal if isinstance(model, BySize) else model,
        None if winner is None else winner.method,
        factor if winner is None or winner.factor is None else winner.factor,
    )


def _prepared(
    subject: Subject,
    material: Material,
    methods: Sequence[Method],
    *,
    factor: float,
    seed: int,
) -> tuple[list[Contender], Gauge]:
    """What is compared, and what it is measured with."""
    model, length, strict = subject.model, subject.length, len(methods) == 1
    if isinstance(model, ImageEncoder | VisionTransformer):
        cells = sides(model.config.cells, goal_cells(model, methods, factor=factor))
        gauge: Gauge = _image_ruler(subject, material, cells)
        return list(assemble_images(model, methods, cells=cells)), gauge
    lengths = lengths_to(length, factor)
    if isinstance(model, Decoder):
        contenders = assemble(model, methods, factor=factor, length=length, strict=strict)
    else:
        contenders = assemble_tables(model, methods, goal=lengths[-1], length=length, strict=strict)
    return list(contenders), _ruler(subject, material, lengths, seed=seed)


def _ruler(subject: Subject, material: Material, lengths: tuple[int, ...], *, seed: int) -> Gauge:
    """What a model of text is measured with."""
    if not isinstance(material, Text):
        raise ArgumentError(
            "--images",
            expected=f"none, for a {subject.family}, which reads text",
            got=str(material.path),
            remedy="Give --text FILE.",
        )
    if isinstance(subject.model, MaskedLM):
        return MaskedRuler.of(material, lengths, seed=seed)
    if isinstance(subject.model, Encoder):
        return RetrievalRuler.of(material, lengths)
    return Ruler.of(material.measured, lengths, material.needles, material.pool, seed=seed)


def _image_ruler(subject: Subject, material: Material, cells: Sequence[Size]) -> ImageRuler:
    """What a model of images is measured with."""
    model = subject.model
    assert isinstance(model, ImageEncoder | VisionTransformer)
    if not isinstance(material, ImageSource):
        raise ArgumentError(
            "--text",
            expected=f"none, for a {subject.family}, which sees images",
            got="a text",
            remedy="Give --images FOLDER.",
        )
    patch = model.config.patch
    pixels = [(patch * height, patch * width) for height, width in cells]
    sizes = {max(size): size for size in pixels}
    if len(sizes) < len(pixels):
        raise ArgumentError(
            "--method",
            expected="sizes of images whose longer sides differ",
            got=", ".join(f"{height}×{width}" for height, width in pixels),
            remedy="Give another size.",
        )
    most = images_for(max(height * width for height, width in cells))
    images = material.read(pixels, channels=model.config.channels, most=most)
    return ImageRuler(images, sizes, model)


def _cells_for(
    model: ImageEncoder | VisionTransformer, lengths: Sequence[int] | None
) -> list[Size]:
    """The trained size, and those whose longer sides are wanted, in cells."""
    height, width = model.config.cells
    patch, side = model.config.patch, max(height, width)
    if lengths is None:
        return sides((height, width), (2 * height, 2 * width))
    cells = [(height, width)]
    for length in sorted(set(lengths) - {patch * side}):
        if length % patch:
            raise ArgumentError(
                "--lengths",
                expected=f"sides in pixels, multiples of the patch ({patch})",
                got=length,
                remedy=f"Try {max(patch, round(length / patch) * patch)}.",
            )
        factor = length / patch / side
        cells.append((max(1, round(factor * height)), max(1, round(factor * width))))
    return cells


def _examine(
    contender: Contender,
    subject: Subject,
    material: Material,
    gauge: Gauge,
    tuning: Tuning,
    say: Callable[[str], None],
) -> tuple[Findings, nn.Module | None]:
    found = Findings(
        key=contender.key,
        role=contender.role,
        claims=_claims(contender),
        advice=contender.advice,
        refusal=contender.refusal,
        writable=contender.role == "method" and contender.trainable,
        served=contender.served,
    )
    if contender.model is None:
        return found, None
    say("measuring")
    found = replace(found, untuned=gauge.measure(contender.model, limit=contender.limit))
    if not tuning.steps or not contender.trainable or not isinstance(material, Text):
        return found, contender.model
    say("fine-tuning")
    try:
        model, seconds = finetuned(
            contender.model,
            material.trained,
            tuning,
            length=subject.length,
            goal=gauge.lengths[-1],
            marks=isinstance(material.needles, ByteNeedles),
            stepped=lambda step, loss: say(f"fine-tuning, step {step}, loss {loss:.3f}"),
        )
    except ArgumentError as error:
        return replace(found, failed=str(error)), None
    say("measuring again")
    tuned = replace(gauge.measure(model), steps=tuning.steps, seconds=seconds)
    return replace(found, tuned=tuned), model


def _claims(contender: Contender) -> tuple[Claimed, ...]:
    entries = [] if contender.method is None else contender.method.entries
    return tuple(_claimed(entry) for entry in entries)


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


def _study(
    subject: Subject,
    material: Material,
    gauge: Gauge,
    found: tuple[Findings, ...],
    *,
    factor: float,
    seed: int,
) -> Study:
    seen: Text | Images
    if isinstance(gauge, ImageRuler):
        unit, seen = "pixel", gauge.images
        factor = factor if factor == 1.0 else gauge.lengths[-1] / gauge.lengths[0]
    else:
        assert isinstance(material, Text)
        unit, seen = material.unit, material
    return Study(
        checkpoint=subject.name,
        family=subject.family,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        length=subject.length,
        factor=factor,
        lengths=gauge.lengths,
        unit=unit,
        text=seen.name,
        sha256=seen.sha256,
        findings=found,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "posenc": version("posenc"),
            "platform": platform_name(),
        },
        device=describe_device(next(subject.model.parameters()).device),
        threads=torch.get_num_threads(),
        seed=seed,
        **gauge.facts(unit),
    )
