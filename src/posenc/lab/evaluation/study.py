"""A checkpoint extended by several methods, measured before and after fine-tuning."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError, Interrupted
from posenc.lab import training
from posenc.lab.evaluation import choosing
from posenc.lab.evaluation.candidates import (
    Candidate,
    Method,
    goal_cells,
    image_candidates,
    text_candidates,
)
from posenc.lab.evaluation.checkpoint import CAUSAL, Checkpoint
from posenc.lab.evaluation.choosing import choose, gate
from posenc.lab.evaluation.images import BySize, Images, ImageSource, ImageSuite, sides
from posenc.lab.evaluation.progress import MeasuredFile, Progress, silent
from posenc.lab.evaluation.results import Findings, Study, StudyReading
from posenc.lab.evaluation.settings import Positions, Tuning
from posenc.lab.evaluation.suites.contexts import ContextSuite, MeasuredContext
from posenc.lab.evaluation.suites.encoders import MaskedSuite, RetrievalSuite
from posenc.lab.evaluation.suites.needles import ByteNeedles
from posenc.lab.evaluation.suites.next_token import NextTokenSuite, Suite, lengths_to
from posenc.lab.evaluation.texts import Text
from posenc.lab.evaluation.turns import Turns
from posenc.lab.experiments.tasks.common import needles
from posenc.lab.experiments.tasks.common.needles import random_windows
from posenc.lab.training.machine import describe_device, versions
from posenc.lab.training.seeding import generator
from posenc.layout import Layout
from posenc.layout.transforms import randomized, skipped
from posenc.transformers.live import LiveEncoder, LiveImages, LiveMaskedLM, LiveModel


@dataclass(frozen=True, eq=False)
class ExtensionResult:
    """The study of several extensions, and the chosen one.

    Args:
        study: all measurements.
        model: extended by the chosen method, and fine-tuned if requested; None: none was chosen.
        method: the chosen one.
    """

    study: Study
    model: LiveModel | None
    method: Method | None


def measure_extensions(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    methods: Sequence[Method],
    *,
    factor: float,
    tuning: Tuning,
    seed: int = 0,
    always: bool = False,
    minutes: float | None = None,
    progress: Progress = silent,
    state: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ExtensionResult:
    """Extend a model by each method, measure all, and choose one.

    A single method that does not fit is an error; of several, it is reported. The baselines are the
    original, where it can be run, and the original with attention, texts or images limited to what
    it was trained at. Causal models may be fine-tuned, baselines included.

    Args:
        checkpoint: to extend.
        data: from ``Checkpoint.data``.
        methods: to extend it by.
        state: a file that keeps readings, so that none is measured again.
        factor, tuning, seed, always, minutes, progress, stop: see ``extend_checkpoint``.

    Raises:
        ArgumentError: if the only method does not fit or diverges in fine-tuning, none can be
            written, a model that is not causal is to be fine-tuned, or the data do not fit.
        CheckpointError: if ``state`` is damaged.
        DataError, Interrupted: as ``extend_checkpoint``.
    """
    began = time.perf_counter()
    if tuning.steps and not isinstance(checkpoint.model, CAUSAL):
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
    sha256 = _source(suite, data).sha256  # changed data are measured anew
    measured_file = MeasuredFile(
        state, checkpoint.model.parameters(), sha256, suite.lengths, seed, tuning, methods
    )
    conclude = partial(study_of, checkpoint, data, suite, factor=factor, seed=seed)
    measuring = _Measuring(
        suite, data, tuning, checkpoint.length, minutes, measured_file, conclude, progress, stop
    )
    findings = measuring.all_findings(candidates)
    progress("done", len(candidates), len(candidates))
    study = conclude(findings)
    if tuning.steps:
        width = next(checkpoint.model.parameters()).shape[-1]
        study = replace(study, finetune=tuning.described(width))
    chosen, reason = choose(study, tuned=bool(tuning.steps), always=always)
    study = replace(study, chosen=chosen, reason=reason, seconds=time.perf_counter() - began)
    winner = next((candidate for candidate in candidates if candidate.key == chosen), None)
    if winner is None:
        return ExtensionResult(study, None, None)
    return ExtensionResult(study, measuring.model(winner), winner.method)


def _report(
    progress: Progress, key: str, done: int, count: int, stage: str, share: float = 0.0
) -> None:
    progress(f"{key}: {stage}", done + min(share, 0.99), count)  # what is late is not done


class Report(Protocol):
    """Called with the stage of one model, and the share of its work that is done."""

    def __call__(self, stage: str, share: float = 0.0) -> None: ...


@dataclass(frozen=True, eq=False)
class _Measuring:
    """Measurement of candidates, before and after fine-tuning; see ``measure_extensions``.

    Args:
        suite: of the measurements.
        data: to fine-tune on.
        tuning: settings of that.
        length: the trained length.
        minutes: of all measurements; None: no limit.
        file: keeps readings.
        conclude: findings to the study of them.
        progress, stop: see ``measure_extensions``.
        models: those measured, by key, as they are after it.
    """

    suite: Suite
    data: Text | ImageSource
    tuning: Tuning
    length: int
    minutes: float | None
    file: MeasuredFile
    conclude: Callable[[tuple[Findings, ...]], Study]
    progress: Progress
    stop: Callable[[], bool]
    models: dict[str, nn.Module] = field(default_factory=dict)

    def all_findings(self, candidates: Sequence[Candidate]) -> tuple[Findings, ...]:
        """The readings of each candidate, or why there are none.

        Raises:
            Interrupted: on ``stop``.
        """
        recorded = {candidate.key: self.file.get(candidate.key) for candidate in candidates}
        new = [candidate for candidate in candidates if recorded[candidate.key] is None]
        readings = self._in_turns(new) if isinstance(self.suite, ContextSuite) else {}
        findings: list[Findings] = []
        for done, candidate in enumerate(candidates):
            known = recorded[candidate.key]
            if known is not None:
                findings.append(replace(candidate.findings, **vars(known)))
                continue
            report = partial(_report, self.progress, candidate.key, done, len(candidates))
            findings.append(self._findings(candidate, readings.get(candidate.key), report))
            self.file.add(findings[-1])
            if done + 1 < len(candidates):
                self._go_on(done + 1, f"{len(candidates)} models")
        return tuple(findings)

    def _go_on(self, done: int, expected: str) -> None:
        if self.stop():
            raise Interrupted(
                "measuring",
                expected=expected,
                got=f"a stop after {done}",
                remedy="Give the same command again to continue.",
            )

    def _in_turns(self, candidates: Sequence[Candidate]) -> dict[str, StudyReading]:
        """The readings of models that read contexts, of those that are level the most."""
        assert isinstance(self.suite, ContextSuite)  # others are measured one after another
        models = {c.key: c.model for c in candidates if c.model is not None}

        def unsettled(readings: Mapping[str, StudyReading], look: int) -> set[str]:
            read = [replace(c.findings, untuned=readings.get(c.key)) for c in candidates]
            return choosing.unsettled(self.conclude(tuple(read)), tuned=False, look=look)

        def keep(key: str, contexts: Sequence[MeasuredContext]) -> None:
            self.file.add_contexts(key, contexts)
            self._go_on(len(contexts), "all contexts")

        return Turns(
            self.suite,
            models,
            seconds=self._seconds(1),
            unsettled=unsettled,
            report=lambda stage, share: self.progress(stage, min(share, 0.99), 1),
            contexts=self.file.contexts,
            keep=keep,
        ).read()

    def _seconds(self, parts: int) -> float | None:
        """For one of so many parts of the measurements before fine-tuning, or after it."""
        if self.minutes is None:
            return None
        return 60 * self.minutes / parts / (2 if self.tuning.steps else 1)

    def _findings(
        self, candidate: Candidate, reading: StudyReading | None, report: Report
    ) -> Findings:
        """The readings of a candidate, or why there are none."""
        if candidate.model is None:
            return candidate.findings
        if reading is None:
            report("measuring")
            reading = self.suite.measure(candidate.model, limit=candidate.limit)
        findings = replace(candidate.findings, untuned=reading)
        self.models[candidate.key] = candidate.model
        if not self.tuning.steps or not candidate.trainable:
            return findings
        report("fine-tuning")
        try:
            tuned, seconds = self._tuned(candidate, report)
        except ArgumentError as error:
            return replace(findings, failed=str(error))
        self.models[candidate.key] = tuned
        report("measuring again")
        again = self._again(candidate.key, tuned, report)
        again = replace(again, steps=self.tuning.steps, seconds=seconds)
        return replace(findings, tuned=again)

    def _again(self, key: str, tuned: nn.Module, report: Report) -> StudyReading:
        """The reading of a fine-tuned model."""
        if not isinstance(self.suite, ContextSuite):
            return self.suite.measure(tuned)
        seconds = self._seconds(len(self.models))
        every = {key: tuned}
        return Turns(self.suite, every, seconds, lambda readings, look: every, report).read()[key]

    def model(self, chosen: Candidate) -> LiveModel:
        """The model to write, fine-tuned anew if it was measured before an interruption."""
        model = self.models.get(chosen.key) or chosen.model
        if chosen.key not in self.models and self.tuning.steps:
            model, _ = self._tuned(chosen, lambda stage, share=0.0: None)
        model = model.goal if isinstance(model, BySize) else model
        assert isinstance(model, LiveModel)  # one that can be written
        return model

    def _tuned(self, candidate: Candidate, report: Report) -> tuple[nn.Module, float]:
        assert isinstance(self.data, Text)  # of a decoder
        assert candidate.model is not None
        return finetuned(
            candidate.model,
            self.data,
            self.tuning,
            length=self.length,
            goal=self.suite.lengths[-1],
            stepped=lambda step, loss: report(f"fine-tuning, step {step}, loss {loss:.3f}"),
        )


def _prepared(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    methods: Sequence[Method],
    *,
    factor: float,
    seed: int,
) -> tuple[list[Candidate], Suite]:
    """The models to compare, and their suite."""
    model, length = checkpoint.model, checkpoint.length
    assert isinstance(model, LiveModel)  # others cannot be extended
    if isinstance(model, LiveImages):
        cells = sides(model.cells, goal_cells(model, methods, factor=factor))
        suite = ImageSuite.of(model, images_of(checkpoint, data), cells)
        return list(image_candidates(model, methods, cells=cells)), suite
    strict = len(methods) == 1
    candidates = text_candidates(model, methods, factor=factor, length=length, strict=strict)
    return list(candidates), text_suite(checkpoint, data, lengths_to(length, factor), seed=seed)


def text_suite(
    checkpoint: Checkpoint, data: Text | ImageSource, lengths: tuple[int, ...], *, seed: int
) -> Suite:
    """The suite for a model of text.

    Raises:
        ArgumentError: if the data are images.
        DataError: if the text is too short.
    """
    if not isinstance(data, Text):
        raise _unfit(checkpoint, "images", data.path, "reads text", "Give a text.")
    if isinstance(checkpoint.model, LiveMaskedLM):
        return MaskedSuite.of(data, lengths, seed=seed)
    if isinstance(checkpoint.model, LiveEncoder):
        return RetrievalSuite.of(data, lengths)
    contexts = ContextSuite.of(checkpoint.model, data, lengths, seed=seed)
    return contexts or NextTokenSuite.of(data, lengths, seed=seed)


def images_of(checkpoint: Checkpoint, data: Text | ImageSource) -> ImageSource:
    """The images for a model of images.

    Raises:
        ArgumentError: if the data are a text.
    """
    if not isinstance(data, ImageSource):
        raise _unfit(checkpoint, "text", "a text", "sees images", "Give images.")
    return data


def _unfit(checkpoint: Checkpoint, name: str, got: object, what: str, remedy: str) -> ArgumentError:
    expected = f"none, for a {checkpoint.family}, which {what}"
    return ArgumentError(name, expected=expected, got=got, remedy=remedy)


def _source(suite: Suite, data: Text | ImageSource) -> Text | Images:
    """The data that were read."""
    if isinstance(suite, ImageSuite):
        return suite.images
    assert isinstance(data, Text)
    return data


def study_of(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    suite: Suite,
    findings: tuple[Findings, ...],
    *,
    factor: float,
    seed: int,
) -> Study:
    """The record of measurements by a suite, with the gate if one stops it."""
    source = _source(suite, data)
    unit = source.unit if isinstance(source, Text) else "pixel"
    if unit == "pixel" and factor != 1.0:
        factor = suite.lengths[-1] / suite.lengths[0]
    study = Study(
        checkpoint=checkpoint.name,
        family=checkpoint.family,
        parameters=sum(p.numel() for p in checkpoint.model.parameters()),
        length=checkpoint.length,
        factor=factor,
        lengths=suite.lengths,
        unit=unit,
        text=source.name,
        sha256=source.sha256,
        findings=findings,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        device=describe_device(next(checkpoint.model.parameters()).device),
        threads=torch.get_num_threads(),
        seed=seed,
        **suite.facts(unit),
    )
    if isinstance(suite, ContextSuite):
        readings = [reading for f in findings for reading in (f.untuned, f.tuned) if reading]
        read = [suite.contexts_in(reading) for reading in readings] or [0]
        study = replace(study, asked=min(read), unread=suite.count - max(read))
    return replace(study, gate=gate(study))


TOKENS_A_STEP = 2048

NEEDLE_SHARE = 0.25
"""Share of rows that ask for needles, as in the training of posenc's own models."""


def finetuned(
    model: nn.Module,
    text: Text,
    tuning: Tuning,
    *,
    length: int,
    goal: int,
    stepped: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[nn.Module, float]:
    """A copy of a decoder, fine-tuned on a text, and the seconds spent.

    Args:
        model: the extended model.
        text: its part to train on; marked bytes are hidden in some rows where ids are bytes.
        tuning: settings.
        length, goal: the trained and the new length.
        stepped: called after each step with its number and loss.

    Raises:
        ArgumentError: if the loss is not finite.
    """
    trained = copy.deepcopy(model).requires_grad_(requires_grad=True)
    weight = next(trained.parameters())
    rate = tuning.rate_for(weight.shape[-1])

    def after(step: int, loss: Tensor, speed: float) -> None:
        if not torch.isfinite(loss):
            raise ArgumentError(
                "finetune_rate",
                expected="a loss that stays a number",
                got=f"none at step {step}",
                remedy=f"Try half of {rate:.2g}.",
            )
        stepped(step, float(loss))

    plan = training.TrainingPlan(
        encoding="",
        seed=tuning.seed,
        steps=tuning.steps,
        rate=rate,
        device=str(weight.device),
        weight_decay=0.0,
        schedule=_triangle,
    )
    size = goal if tuning.positions == "plain" else length
    windows = _Windows(text, tuning.positions, size, goal)
    done = training.fit(trained, windows, plan, training.Watch(stepped=after))
    return done.model, done.seconds


@dataclass(frozen=True, eq=False)
class _Windows:
    """A task of predicting windows of a text, at positions up to the goal; see ``finetuned``."""

    text: Text
    positions: Positions
    size: int
    goal: int
    fingerprint: str = ""

    @property
    def rows(self) -> int:
        """Windows of a step."""
        return max(1, TOKENS_A_STEP // self.size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of these."""
        return self.rows * self.size

    def batch(self, seed: int, step: int) -> dict[str, Tensor | Layout]:
        """``inputs``, ``targets`` ``[rows, size]`` and their ``layout``."""
        draw = generator(seed, step)
        windows = random_windows(
            self.text.trained,
            self.text.trained_pieces,
            rows=self.rows,
            length=self.size + 1,
            source=draw,
        )
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        asking = round(NEEDLE_SHARE * self.rows) if self.rows > 1 else step % 4 == 0
        if isinstance(self.text.needles, ByteNeedles) and asking:
            needles.hide(inputs[: int(asking)], targets[: int(asking)], draw)
        layout = Layout.sequence(self.size)
        if self.positions == "randomized":
            layout = randomized(layout, max_length=self.goal, generator=draw)
        elif self.positions == "skipped":
            layout = skipped(layout, max_length=self.goal, generator=draw)
        return {"inputs": inputs, "targets": targets, "layout": layout}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        logits = model(batch["inputs"], batch["layout"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())


def _triangle(step: int, steps: int) -> float:
    """Share of the peak rate: rising over a tenth of the steps, then falling linearly."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    return max(0.0, 1 - (step - rising) / max(1, steps - rising))
