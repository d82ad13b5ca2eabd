"""Measure a checkpoint as it is, or extended by several methods before and after fine-tuning."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from posenc.errors import ArgumentError, Interrupted
from posenc.evaluation.candidates import CUT, Candidate, Method, decoder_candidates
from posenc.evaluation.checkpoint import Checkpoint
from posenc.evaluation.choosing import choose
from posenc.evaluation.finetuning import Tuning, finetuned
from posenc.evaluation.images import Images, ImageSource
from posenc.evaluation.position_tables import goal_cells, image_candidates, table_candidates
from posenc.evaluation.progress import MeasuredFile, Progress, silent
from posenc.evaluation.results import Findings, Study
from posenc.evaluation.suites.images import BySize, ImageSuite, cells_of, sides
from posenc.evaluation.suites.masked import MaskedSuite
from posenc.evaluation.suites.needles import ByteNeedles
from posenc.evaluation.suites.next_token import NextTokenSuite, Suite, lengths_to
from posenc.evaluation.suites.retrieval import RetrievalSuite
from posenc.evaluation.texts import Text
from posenc.models import Decoder, Encoder, ImageEncoder, MaskedLM, VisionTransformer
from posenc.training.machine import describe_device, platform_name

__all__ = ["ExtensionResult", "evaluate", "measure_extensions"]


@dataclass(frozen=True, eq=False)
class ExtensionResult:
    """The study of several extensions, and the chosen one.

    Args:
        study: all measurements.
        model: extended by the chosen method and, if asked for, fine-tuned; None: none was chosen.
        method: the chosen one.
        factor: by which the chosen one makes the trained length longer.
    """

    study: Study
    model: nn.Module | None
    method: Method | None
    factor: float


def evaluate(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Study:
    """Measure a model as it is.

    An encoder is given no more than its table has positions for. A model of images has its table
    interpolated for larger ones, as transformers does if asked to.

    Args:
        checkpoint: to measure.
        data: of ``Checkpoint.data``.
        lengths: of contexts; half, once and twice its own by default. Of images sides in pixels.
        seed: of needles, words and masks.
        progress: called as the work proceeds.

    Raises:
        DataError: when the text is too short, or images cannot be read.
        ArgumentError: when the data do not fit the model, or on sizes that it cannot be shown.
    """
    began = time.perf_counter()
    model, limit, key = checkpoint.model, None, "direct"
    if isinstance(model, ImageEncoder | VisionTransformer):
        cells = cells_of(model, lengths)
        suite: Suite = ImageSuite.of(model, _images(checkpoint, data), cells)
        *_, candidate = image_candidates(model, [Method.parse("interpolate")], cells=cells)
        assert candidate.model is not None
        measured, key = candidate.model, candidate.key
    else:
        chosen = tuple(sorted(set(lengths))) if lengths else lengths_to(checkpoint.length, 2.0)
        suite, measured = _text_suite(checkpoint, data, chosen, seed=seed), model
        if not isinstance(model, Decoder):
            limit, key = checkpoint.length, CUT
    progress("measuring", 0, 1)
    reading = suite.measure(measured, limit=limit)
    progress("measured", 1, 1)
    findings = Findings(key=key, role="baseline", untuned=reading)
    study = _study(checkpoint, data, suite, (findings,), factor=1.0, seed=seed)
    return replace(study, seconds=time.perf_counter() - began)


def measure_extensions(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    methods: Sequence[Method],
    *,
    factor: float,
    tuning: Tuning,
    seed: int = 0,
    always: bool = False,
    progress: Progress = silent,
    state: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ExtensionResult:
    """Extend a model by each method, measure all, and choose one.

    A single method is refused with an error where it does not fit; of several, those that do not
    fit are reported so. Measured beside them are the original, where it can be run, and the model
    as trained with its attention, its texts or its images cut to what it was trained at. Causal
    models may be fine-tuned, the baselines as all others.

    Args:
        checkpoint: to extend.
        data: of ``Checkpoint.data``.
        methods: to extend it by.
        factor: by which its trained length grows.
        tuning: of each; 0 steps for none.
        seed: of needles, words and masks.
        always: choose the best of several methods even where none gains anything over the model
            as it is.
        progress: called as the work proceeds.
        state: a file that keeps what has been measured; what it holds is not measured again.
        stop: asked after each model; True raises ``Interrupted``.

    Raises:
        ArgumentError: when the only method does not fit or diverges in fine-tuning, none can be
            written, a model that is not causal is to be fine-tuned, or the data do not fit.
        DataError: when the text is too short, or images cannot be read.
        CheckpointError: when ``state`` is damaged.
        Interrupted: when ``stop`` says so.
    """
    began = time.perf_counter()
    if tuning.steps and not isinstance(checkpoint.model, Decoder):
        raise ArgumentError(
            "finetune_steps",
            expected=f"0 for a {checkpoint.family}",
            got=tuning.steps,
            remedy="Only models of the next token are fine-tuned here.",
        )
    candidates, suite = _prepared(checkpoint, data, methods, factor=factor, seed=seed)
    if not any(candidate.writable for candidate in candidates):
        raise ArgumentError(
            "method",
            expected="a method that a checkpoint can hold",
            got=", ".join(method.spec for method in methods),
            remedy="Choose another method; posenc evaluate measures a model as it is.",
        )
    # What is read, not what is in memory, so that a changed text or image is measured anew.
    seen = suite.images.sha256 if isinstance(suite, ImageSuite) else data.sha256  # type: ignore[union-attr]
    measured = MeasuredFile(state, checkpoint.model, seen, suite.lengths, seed, tuning, methods)
    findings: list[Findings] = []
    models: dict[str, nn.Module] = {}
    for done, candidate in enumerate(candidates):

        def report(stage: str, key: str = candidate.key, done: int = done) -> None:
            progress(f"{key}: {stage}", done, len(candidates))

        known = measured.get(candidate.key)
        if known is not None:
            findings.append(replace(candidate.findings, **known))
            continue
        result, model = _measured(candidate, checkpoint, data, suite, tuning, report)
        findings.append(result)
        measured.add(result)
        if model is not None:
            models[candidate.key] = model
        if stop() and done + 1 < len(candidates):
            raise Interrupted(
                "measuring",
                expected=f"{len(candidates)} models",
                got=f"a stop after {done + 1}",
                remedy="Give the same command again to continue.",
            )
    progress("done", len(candidates), len(candidates))
    study = _study(checkpoint, data, suite, tuple(findings), factor=factor, seed=seed)
    if tuning.steps:
        width = next(checkpoint.model.parameters()).shape[-1]
        study = replace(study, finetune=tuning.described(width))
    chosen, reason = choose(study, tuned=bool(tuning.steps), always=always)
    study = replace(study, chosen=chosen, reason=reason, seconds=time.perf_counter() - began)
    winner = next((each for each in candidates if each.key == chosen), None)
    if winner is None:
        return ExtensionResult(study, None, None, factor)
    model = models.get(winner.key)
    if model is None:  # measured before a stop
        model = winner.model
        if tuning.steps:
            model, _ = _finetuned(winner, checkpoint, data, suite, tuning, lambda stage: None)
    return ExtensionResult(
        study,
        model.goal if isinstance(model, BySize) else model,
        winner.method,
        factor if winner.factor is None else winner.factor,
    )


def _prepared(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    methods: Sequence[Method],
    *,
    factor: float,
    seed: int,
) -> tuple[list[Candidate], Suite]:
    """The models to compare, and the suite that measures them."""
    model, length, strict = checkpoint.model, checkpoint.length, len(methods) == 1
    if isinstance(model, ImageEncoder | VisionTransformer):
        cells = sides(model.config.cells, goal_cells(model, methods, factor=factor))
        suite = ImageSuite.of(model, _images(checkpoint, data), cells)
        return list(image_candidates(model, methods, cells=cells)), suite
    lengths = lengths_to(length, factor)
    if isinstance(model, Decoder):
        candidates = decoder_candidates(model, methods, factor=factor, length=length, strict=strict)
    else:
        candidates = table_candidates(
            model, methods, goal=lengths[-1], length=length, strict=strict
        )
    return list(candidates), _text_suite(checkpoint, data, lengths, seed=seed)


def _text_suite(
    checkpoint: Checkpoint, data: Text | ImageSource, lengths: tuple[int, ...], *, seed: int
) -> Suite:
    """The measurements of a model that reads text."""
    if not isinstance(data, Text):
        raise ArgumentError(
            "images",
            expected=f"none, for a {checkpoint.family}, which reads text",
            got=data.path,
            remedy="Give a text.",
        )
    if isinstance(checkpoint.model, MaskedLM):
        return MaskedSuite.of(data, lengths, seed=seed)
    if isinstance(checkpoint.model, Encoder):
        return RetrievalSuite.of(data, lengths)
    return NextTokenSuite.of(data.measured, lengths, data.needles, data.pool, seed=seed)


def _images(checkpoint: Checkpoint, data: Text | ImageSource) -> ImageSource:
    if not isinstance(data, ImageSource):
        raise ArgumentError(
            "text",
            expected=f"none, for a {checkpoint.family}, which sees images",
            got="a text",
            remedy="Give images.",
        )
    return data


def _measured(
    candidate: Candidate,
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    suite: Suite,
    tuning: Tuning,
    report: Callable[[str], None],
) -> tuple[Findings, nn.Module | None]:
    """The findings on one candidate, and its model after fine-tuning; None: it has none."""
    if candidate.model is None:
        return candidate.findings, None
    report("measuring")
    reading = suite.measure(candidate.model, limit=candidate.limit)
    findings = replace(candidate.findings, untuned=reading)
    if not tuning.steps or not candidate.trainable or not isinstance(data, Text):
        return findings, candidate.model
    report("fine-tuning")
    try:
        model, seconds = _finetuned(candidate, checkpoint, data, suite, tuning, report)
    except ArgumentError as error:
        return replace(findings, failed=str(error)), None
    report("measuring again")
    tuned = replace(suite.measure(model), steps=tuning.steps, seconds=seconds)
    return replace(findings, tuned=tuned), model


def _finetuned(
    candidate: Candidate,
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    suite: Suite,
    tuning: Tuning,
    report: Callable[[str], None],
) -> tuple[nn.Module, float]:
    assert isinstance(data, Text)  # no others are fine-tuned
    assert candidate.model is not None
    return finetuned(
        candidate.model,
        data.trained,
        tuning,
        length=checkpoint.length,
        goal=suite.lengths[-1],
        byte_needles=isinstance(data.needles, ByteNeedles),
        stepped=lambda step, loss: report(f"fine-tuning, step {step}, loss {loss:.3f}"),
    )


def _study(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    suite: Suite,
    findings: tuple[Findings, ...],
    *,
    factor: float,
    seed: int,
) -> Study:
    seen: Text | Images
    if isinstance(suite, ImageSuite):
        unit, seen = "pixel", suite.images
        factor = factor if factor == 1.0 else suite.lengths[-1] / suite.lengths[0]
    else:
        assert isinstance(data, Text)
        unit, seen = data.unit, data
    return Study(
        checkpoint=checkpoint.name,
        family=checkpoint.family,
        parameters=sum(p.numel() for p in checkpoint.model.parameters()),
        length=checkpoint.length,
        factor=factor,
        lengths=suite.lengths,
        unit=unit,
        text=seen.name,
        sha256=seen.sha256,
        findings=findings,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "posenc": version("posenc"),
            "platform": platform_name(),
        },
        device=describe_device(next(checkpoint.model.parameters()).device),
        threads=torch.get_num_threads(),
        seed=seed,
        **suite.facts(unit),
    )
