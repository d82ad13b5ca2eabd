"""A checkpoint measured as it is: loss, needles and answers by length, and how far it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from posenc.errors import ArgumentError, Interrupted
from posenc.lab.evaluation.candidates import CUT, WINDOW, Method, cut, image_candidates
from posenc.lab.evaluation.checkpoint import CAUSAL, Checkpoint
from posenc.lab.evaluation.images import ImageSource, ImageSuite, cells_of
from posenc.lab.evaluation.lengths import (
    Series,
    affordable,
    effective_length,
    next_length,
    rise,
    task_series,
)
from posenc.lab.evaluation.progress import MeasuredFile, Progress, silent
from posenc.lab.evaluation.questions import Unfit, task_names
from posenc.lab.evaluation.results import Effective, Findings, KeyTokens, Rise, Study, StudyReading
from posenc.lab.evaluation.scoring import Examination
from posenc.lab.evaluation.settings import EvaluationSettings
from posenc.lab.evaluation.study import images_of, study_of, text_suite
from posenc.lab.evaluation.suites.contexts import ContextSuite, MeasuredContext, lengths_around
from posenc.lab.evaluation.suites.key_tokens import longest_short, measure_key_tokens
from posenc.lab.evaluation.suites.needles import DEPTHS, KeyNeedles
from posenc.lab.evaluation.suites.next_token import (
    BUDGET,
    FEWEST,
    POSITION,
    NextTokenSuite,
    Suite,
    lengths_to,
)
from posenc.lab.evaluation.texts import Text
from posenc.lab.evaluation.turns import Turns
from posenc.lab.reporting.numbers import confidence_after, confidence_at
from posenc.lab.training.stopping import Deadline
from posenc.transformers.live import LiveDecoder, LiveImages, LiveModel

SHORTEST = 8
"""Tokens of the shortest context."""

ABILITIES = {"loss": "loss", "needles": "recall"}
"""Metric → the ability that it shows."""


def evaluate(
    checkpoint: Checkpoint,
    data: Text | ImageSource,
    settings: EvaluationSettings | None = None,
    *,
    progress: Progress = silent,
    state: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> Study:
    """Measure a model as it is.

    A causal model is also asked the questions of ``posenc.lab.evaluation.questions``, and measured
    with its attention limited to the trained length, as a control. Where its loss rises before the
    trained length, or the longest text is too long, lengths between are measured too.

    Inputs of an encoder are cut to the length of its table. A model of images has its table
    interpolated for larger ones, as transformers does on request.

    Args:
        checkpoint: to measure.
        data: from ``Checkpoint.data``.
        settings: by default those of ``EvaluationSettings``.
        progress: called as the work proceeds.
        state: a file that keeps readings of texts, so that none is measured again.
        stop: called between measurements; True raises ``Interrupted``.
        **fields: of ``EvaluationSettings``, over ``settings``: ``lengths=(64, 128)``.

    Raises:
        DataError: if the text is too short, or images cannot be read.
        ArgumentError: if the data do not fit the model, a size cannot be shown to it, or the limits
            leave too little.
        CheckpointError: if ``state`` is damaged.
        Interrupted: on ``stop``.
    """
    settings = replace(settings or EvaluationSettings(), **fields)
    began = time.perf_counter()
    if settings.short_context is not None and not isinstance(checkpoint.model, CAUSAL):
        raise ArgumentError(
            "short_context",
            expected=f"none, for a {checkpoint.family}, which does not predict the next token",
            got=settings.short_context,
            remedy="Leave it out.",
        )
    if isinstance(checkpoint.model, LiveImages):
        progress("measuring", 0, 1)
        study = _of_images(checkpoint, images_of(checkpoint, data), settings)
    else:
        study = _Measurement(checkpoint, data, settings, progress, state, stop).study()
    progress("measured", 1, 1)
    return replace(study, seconds=time.perf_counter() - began)


def _of_images(checkpoint: Checkpoint, data: ImageSource, settings: EvaluationSettings) -> Study:
    model = checkpoint.model
    assert isinstance(model, LiveImages)
    cells = cells_of(model, settings.lengths)
    suite, key = ImageSuite.of(model, data, cells), "direct"
    measured: nn.Module = model
    if model.table is not None:
        *_, candidate = image_candidates(model, [Method.parse("interpolate")], cells=cells)
        assert candidate.model is not None  # tables of images can always be interpolated
        measured, key = candidate.model, candidate.key
    findings = Findings(key=key, role="baseline", untuned=suite.measure(measured))
    return study_of(checkpoint, data, suite, (findings,), factor=1.0, seed=settings.seed)


class _Measurement:
    """Measurements of a model of text; see ``evaluate``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        data: Text | ImageSource,
        settings: EvaluationSettings,
        progress: Progress,
        state: Path | None,
        stop: Callable[[], bool],
    ) -> None:
        self.checkpoint, self.data, self.settings = checkpoint, data, settings
        self.progress, self.stop = progress, stop
        self.deadline = Deadline(settings.minutes)
        self.model, self.key = checkpoint.model, "direct"
        self.limit: int | None = None
        if isinstance(self.model, LiveModel) and self.model.table is not None:
            candidate = cut(self.model, checkpoint.length)
            assert candidate.model is not None  # any text can be cut
            self.model, self.key, self.limit = candidate.model, CUT, candidate.limit
        self.left_out: dict[str, str] = {}
        self.suite = self._chosen()
        unit = data.unit if isinstance(data, Text) else ""
        self.chance = float(self.suite.facts(unit).get("chance", 0.0))
        self._require_longer(settings.short_context)
        self.examination = Examination("")
        if isinstance(checkpoint.model, CAUSAL) and isinstance(data, Text):
            self.examination = Examination.of(data, settings, goal=self.suite.lengths[-1])
            if self.examination.refusal:
                names = task_names(settings.tasks)
                self.left_out |= dict.fromkeys(names, self.examination.refusal)
        source = data.sha256 if isinstance(data, Text) else ""
        conditions = replace(settings, minutes=1.0), self.suite.lengths, self.examination.count
        self.measured_file = MeasuredFile(state, checkpoint.model.parameters(), source, conditions)

    def study(self) -> Study:
        """All measurements, and the effective length."""
        if isinstance(self.suite, ContextSuite):
            reading, control = self._in_turns(self.suite)
        else:
            reading, control = self._by_windows(), None
        reading = self._questions(reading)
        while (effective := self._effective(reading)) is not None:
            suite, middle = self.suite, next_length(effective, self.suite.lengths)
            settled = self.settings.lengths is not None or self.deadline.left <= 0
            if middle is None or settled or not isinstance(suite, NextTokenSuite):
                break
            self._step(f"loss and needles at {middle}")
            self.suite, reading = suite.further(self.model, reading, middle)
            self._keep(reading)
            reading = self._questions(reading)
        findings = [Findings(key=self.key, role="baseline", untuned=reading)]
        control = control or self._controlled()
        findings += [Findings(key=WINDOW, role="baseline", untuned=control)] if control else []
        seed, suite = self.settings.seed, self.suite
        study = study_of(self.checkpoint, self.data, suite, tuple(findings), factor=1.0, seed=seed)
        if not study.gate:
            known = effective if effective is not None and effective.abilities else None
            study = replace(study, effective=known, rise=self._rise(reading))
        key_tokens, style = self._key_tokens(effective), self.examination.style
        return replace(study, key_tokens=key_tokens, style=style, left_out=self.left_out)

    def _require_longer(self, short: int | None) -> None:
        """Require the trained length, or the longest measured up to it, beyond short contexts."""
        reference = self._stated
        if short is not None and longest_short(short) >= reference:
            raise ArgumentError(
                "short_context",
                expected=f"less than four fifths of {reference}, the length that is compared with",
                got=short,
                remedy="Give fewer tokens, or measure a longer trained length.",
            )

    @property
    def _stated(self) -> int:
        """The trained length, or the longest measured one up to it."""
        lengths = self.suite.lengths
        return max((n for n in lengths if n <= self.checkpoint.length), default=lengths[0])

    def _key_tokens(self, effective: Effective | None) -> KeyTokens | None:
        """The loss on key tokens, if it is asked for, and there is time."""
        short, data = self.settings.short_context, self.data
        if short is None or not isinstance(data, Text):
            return None
        reference = self._stated if effective is None else effective.reference
        if longest_short(short) >= reference:
            self.left_out["key tokens"] = f"the model reads no more than {reference} {data.unit}s"
            return None
        if self.deadline.left <= 0:
            self.left_out["key tokens"] = "minutes: there was no time left"
            return None
        self._step("key tokens")
        lengths = self.suite.lengths
        return measure_key_tokens(self.model, data, lengths, short=short, reference=reference)

    def _in_turns(self, suite: ContextSuite) -> tuple[StudyReading, StudyReading | None]:
        """The readings of contexts by the model, and by its control."""
        models = {self.key: self.model}
        control = self._control()
        models |= {} if control is None else {WINDOW: control}

        def unsettled(readings: dict[str, StudyReading], look: int) -> Collection[str]:
            effective = self._effective(readings[self.key], confidence_at(look))
            return () if effective is not None and effective.settled(suite.lengths) else models

        def keep(key: str, contexts: Sequence[MeasuredContext]) -> None:
            self.measured_file.add_contexts(key, contexts)
            if self.stop():
                raise self._stopped(f"a stop after {len(contexts)} contexts")

        readings = Turns(
            suite,
            models,
            self.deadline.left,
            unsettled,
            report=lambda stage, share: self.progress(stage, share, 1),
            contexts=self.measured_file.contexts,
            keep=keep,
        ).read()
        return readings[self.key], readings.get(WINDOW)

    def _by_windows(self) -> StudyReading:
        """The reading of one window for each number, with lengths before a rise of the loss."""
        reading = self.measured_file.untuned(self.key)
        if reading is not None:
            if isinstance(self.suite, NextTokenSuite):
                self.suite = replace(self.suite, lengths=tuple(reading.loss))
            return reading
        self._step("loss and needles")
        reading = self.suite.measure(self.model, limit=self.limit)
        risen = self._rise(reading)
        by_windows = isinstance(self.suite, NextTokenSuite)
        if risen is not None and self.settings.lengths is None and by_windows:
            self._shorten(risen, reading)
            self._step("loss and needles at shorter lengths")
            reading = self.suite.measure(self.model, limit=self.limit)
        self._keep(reading)
        return reading

    def _chosen(self) -> Suite:
        """The suite of the given lengths, or of those around the trained one."""
        length, data, given = self.checkpoint.length, self.data, self.settings.lengths
        if isinstance(data, Text) and isinstance(data.needles, KeyNeedles):
            contexts = ContextSuite.of(
                self.checkpoint.model,
                data,
                tuple(sorted(set(given or lengths_around(length, data.needles.encode)))),
                seed=self.settings.seed,
            )
            if contexts is not None:
                return contexts
        return self._suite(self._affordable(tuple(sorted(set(given or lengths_to(length, 2.0))))))

    def _suite(self, lengths: tuple[int, ...]) -> Suite:
        return text_suite(self.checkpoint, self.data, lengths, seed=self.settings.seed)

    def _affordable(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths within the limits."""
        memory, minutes = self.settings.memory, self.settings.minutes
        if (memory is None and minutes is None) or not isinstance(self.data, Text):
            return lengths
        affordable_lengths, self.left_out = affordable(
            self.model,
            self.data.measured,
            lengths,
            needed=min(self.checkpoint.length, lengths[-1]),
            passes=self._passes(lengths[-1]),
            memory=memory,
            minutes=minutes,
            limit=self.limit,
        )
        return affordable_lengths

    def _passes(self, goal: int) -> int:
        """About how many texts are read at each length: for losses, copying, needles, questions."""
        windows = max(FEWEST, BUDGET // goal)
        asked = self.settings.questions or windows
        return (
            2 * windows + len(DEPTHS) * windows // 4 + len(task_names(self.settings.tasks)) * asked
        )

    def _step(self, stage: str) -> None:
        """Announce a stage, unless a stop is asked for."""
        if self.stop():
            raise self._stopped(f"a stop before {stage.replace(', step', '')}")
        self.progress(stage, 0, 1)

    def _stopped(self, got: str) -> Interrupted:
        remedy = "Give the same command again to continue."
        return Interrupted("measuring", expected="all measurements", got=got, remedy=remedy)

    def _keep(self, reading: StudyReading) -> None:
        self.measured_file.add(Findings(key=self.key, role="baseline", untuned=reading))

    def _rise(self, reading: StudyReading) -> Rise | None:
        """The place before the trained length at which the loss rises; see ``rise``."""
        places = reading.pieces.get(POSITION, {})
        return rise(places, claimed=self.checkpoint.length)

    def _shorten(self, risen: Rise, reading: StudyReading) -> None:
        """Add lengths before a rise of the loss to the suite."""
        first = risen.position == sorted(reading.pieces[POSITION])[1]
        parts = (8, 4, 2, 1) if first else (2, 1)  # in the first place the loss may have risen too
        shorter = {max(SHORTEST, risen.position // part) for part in parts}
        self.suite = self._suite(tuple(sorted({*self.suite.lengths, *shorter})))

    def _questions(self, reading: StudyReading) -> StudyReading:
        """The reading with questions at the reference, and longer ones of what is learned there."""
        effective = self._effective(replace(reading, tasks={}))
        if effective is None:
            return reading
        reference, most = effective.reference, effective.cut or self.suite.lengths[-1]
        longer = [n for n in self.suite.lengths if reference < n <= most]
        for name in self.examination.names:
            for length in (reference, *longer):
                shares_by_length = reading.tasks.get(name, {})
                if length not in shares_by_length:
                    shares = self._asked(name, length)
                    if shares is None:
                        break
                    shares_by_length = dict(sorted({**shares_by_length, length: shares}.items()))
                    reading = replace(reading, tasks={**reading.tasks, name: shares_by_length})
                    self._keep(reading)
                if not task_series(name, shares_by_length).learned(reference, ()):
                    break
        return reading

    def _asked(self, name: str, length: int) -> tuple[float, ...] | None:
        """Shares of right answers; None where there are no such questions, or no time."""
        if self.deadline.left <= 0:
            self.left_out[name] = "minutes: there was no time left"
            return None
        self._step(f"questions, step {name} at {length}")
        try:
            return self.examination.ask(self.checkpoint.model, name, length)
        except Unfit as reason:
            self.left_out[name] = str(reason)
            return None

    def _effective(
        self, reading: StudyReading, confidence: float | None = None
    ) -> Effective | None:
        """The effective length by a reading; None where all texts are cut."""
        confidence = confidence or confidence_after(reading.looks)
        series = [
            Series(ability, ability, reading.pieces[key], key == "loss", self.chance)
            for key, ability in ABILITIES.items()
            if key in reading.pieces
        ]
        series += [task_series(name, values) for name, values in reading.tasks.items()]
        series = [replace(one, confidence=confidence) for one in series]
        most = self.checkpoint.length if self.key == CUT else None
        if most is not None and self.suite.lengths[0] > most:
            return None
        claimed, margin = self.checkpoint.length, self.settings.margin
        return effective_length(series, claimed=claimed, margin=margin, most=most)

    def _control(self) -> nn.Module | None:
        """The model with attention to a window of the trained length, if any text is longer."""
        model, length = self.checkpoint.model, self.checkpoint.length
        if not isinstance(model, LiveDecoder) or not model.rotates or model.windowed:
            return None
        return model.cut(length) if self.suite.lengths[-1] > length else None

    def _controlled(self) -> StudyReading | None:
        """The reading of the control, if there is one, and time for it."""
        control, reading = self._control(), self.measured_file.untuned(WINDOW)
        if control is None or self.deadline.left <= 0 or reading is not None:
            return reading
        self._step("a sliding window")
        reading = self.suite.measure(control)
        self.measured_file.add(Findings(key=WINDOW, role="baseline", untuned=reading))
        return reading
