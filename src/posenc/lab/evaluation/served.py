"""A model behind a server, measured by questions: how far it reads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import fmean

from posenc.errors import ArgumentError, Interrupted
from posenc.lab.evaluation.endpoint import Endpoint, EndpointError
from posenc.lab.evaluation.examiner import REFUSED, ServedExaminer
from posenc.lab.evaluation.lengths import effective_length, next_length, task_series
from posenc.lab.evaluation.progress import MeasuredFile, Progress, silent
from posenc.lab.evaluation.questions import TASKS, Question, QuestionMaker, Unfit, task_names
from posenc.lab.evaluation.questions.question import Source
from posenc.lab.evaluation.results import Effective, Findings, Study, StudyReading
from posenc.lab.evaluation.scoring import FEWEST, MOST
from posenc.lab.evaluation.settings import EvaluationSettings, ServedSettings
from posenc.lab.evaluation.suites.next_token import BUDGET, words
from posenc.lab.evaluation.texts import Text, read_ids, read_tokenizer
from posenc.lab.training.machine import versions
from posenc.lab.training.stopping import Deadline

LOCAL = ("images", "device", "dtype", "memory", "short_context")
"""Settings that a served model does not have."""

LIMITS = ("max_model_len", "context_length", "n_ctx_train")
"""Fields of a model's description with its longest context."""

SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Lengths by default, as multiples of the trained one."""

SHORTEST = 256
"""Tokens of the shortest length by default."""

LONGEST = 1 << 24
"""Tokens of the longest context that a server is believed to take."""

KEY = "direct"


def evaluate_served(
    endpoint: Endpoint,
    settings: EvaluationSettings,
    served: ServedSettings,
    *,
    progress: Progress = silent,
    state: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Study:
    """Measure how far a served model reads, by the questions of ``evaluate``.

    A base model is asked by ``/completions``: an answer counts if each of its tokens has the
    highest log-probability, where the server gives those of a prompt (``echo``), else if it stands
    in the greedy continuation. A chat model is asked by ``/chat/completions``. Lengths are counted
    by the given tokenizer, or estimated from the server's own counts (``usage``), to some percent.

    Args:
        endpoint: of the model.
        settings: as of ``evaluate``; no task at all means all of them.
        served: tokenizer and concurrency.
        progress, state, stop: see ``evaluate``.

    Raises:
        ArgumentError: if a setting is one of local models, or the trained length is unknown.
        CheckpointError: if the tokenizer or ``state`` is damaged.
        DataError: if the text is unusable.
        EndpointError: if the server does not answer.
        Interrupted: on ``stop``.
    """
    defaults = EvaluationSettings()
    for name in LOCAL:
        if getattr(settings, name) != getattr(defaults, name):
            raise ArgumentError(
                name,
                expected="none, for a served model",
                got=getattr(settings, name),
                remedy="It is for models that posenc runs; leave it out.",
            )
    began = time.perf_counter()
    study = _ServedMeasurement(endpoint, settings, served, progress, state, stop).study()
    progress("measured", 1, 1)
    return replace(study, seconds=time.perf_counter() - began)


class _ServedMeasurement:
    """Measurements of a served model; see ``evaluate_served``."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: EvaluationSettings,
        served: ServedSettings,
        progress: Progress,
        state: Path | None,
        stop: Callable[[], bool],
    ) -> None:
        self.endpoint, self.settings, self.served = endpoint, settings, served
        self.progress, self.stop = progress, stop
        self.deadline = Deadline(settings.minutes)
        self.names = task_names(settings.tasks) or tuple(TASKS)
        self.text: Text = read_ids(settings.text, encode=None, training=False)
        folder = served.tokenizer
        tokenizer = None if folder is None else read_tokenizer(folder, vocabulary=1 << 31)
        self.length = settings.trained_length or self._stated()
        self.lengths = self._lengths()
        self.examiner = ServedExaminer(endpoint, settings.style, tokenizer, served.thinking)
        identity = ""
        if tokenizer is not None:
            form = self.examiner.style, self.examiner.overhead
            identity = repr((tokenizer.identity, self.text.sha256, "served", *form))
        source, seed = Source(self.text.plain), settings.seed
        self.maker = QuestionMaker(source, self.examiner.cost, seed, identity)
        self.count = settings.questions or min(MOST, max(FEWEST, BUDGET // self.lengths[-1]))
        self.tasks: dict[str, dict[int, tuple[float, ...]]] = {name: {} for name in self.names}
        self.rates: dict[str, float] = {}
        self.left_out: dict[str, str] = {}
        self.tokens, self.seconds = 0, 0.0
        form = self.examiner.style, self.examiner.thinking
        conditions = replace(settings, minutes=1.0), endpoint.url, endpoint.model, identity, *form
        self.measured_file = MeasuredFile(
            state, (), self.text.sha256, *conditions, self.lengths, self.count
        )
        kept = self.measured_file.untuned(KEY)
        if kept is not None:
            self.tasks |= {name: dict(values) for name, values in kept.tasks.items()}

    def _stated(self) -> int:
        """The longest context, as the server describes its model."""
        models = self.endpoint.models()
        (only,) = models.values() if len(models) == 1 else ({},)  # it may be asked by any name
        described = models.get(self.endpoint.model, only)
        meta = described.get("meta")
        facts = {**(meta if isinstance(meta, dict) else {}), **described}
        for name in LIMITS:
            if isinstance(facts.get(name), int) and SHORTEST <= facts[name] <= LONGEST:
                return int(facts[name])
        raise ArgumentError(
            "trained_length",
            expected="the length that the model was trained at, in tokens",
            got=f"none, and the server does not say {LIMITS[0]} of {self.endpoint.model}",
            remedy="Give it, as its config.json has it.",
        )

    def _lengths(self) -> tuple[int, ...]:
        given = self.settings.lengths
        if given is not None:
            return tuple(sorted(set(given)))
        multiples = (round(share * self.length) for share in SHARES)
        return tuple(n for n in multiples if n >= min(SHORTEST, self.length))

    def study(self) -> Study:
        """All measurements, and the effective length."""
        done: list[int] = []
        for length in self.lengths:
            reason = self._asked_at(length, first=not done)
            if reason:
                rest = self.lengths[self.lengths.index(length) :]
                self.left_out |= {str(n): reason for n in rest}
                break
            done.append(length)
            if not self._learned(done[0]):
                break
        while (effective := self._effective(done)) and self.settings.lengths is None:
            middle = next_length(effective, done)
            if middle is None or self._asked_at(middle, first=False):
                break
            done = sorted((*done, middle))
        return self._study(tuple(done), effective)

    def _asked_at(self, length: int, *, first: bool) -> str:
        """Ask all tasks at a length; the reason why not, for which it is left out again."""
        names = [n for n in self.names if n not in self.left_out]
        for number, name in enumerate(names if first else self._learned(self.lengths[0])):
            if length in self.tasks[name]:
                continue
            if self.stop():
                remedy = "Give the same command again to continue."
                got = f"a stop before {name} at {length}"
                raise Interrupted("measuring", expected="all answers", got=got, remedy=remedy)
            if self.deadline.left <= 0 and not first:
                reason = "minutes: there was no time left"
                break
            done = self.lengths.index(length) if length in self.lengths else len(self.lengths)
            share = (done + number / len(names)) / (len(self.lengths) + 1)
            self.progress(f"questions, step {name} at {length}", share, 1)
            try:
                self.tasks[name][length] = self._asked(name, length)
            except Unfit as unfit:
                reason = str(unfit)
                if not first:
                    break
                self.left_out[name] = reason
            except EndpointError as error:
                if first or error.status not in REFUSED:
                    raise
                reason = f"the server refused it: {error.got}"
                break
            else:
                self.measured_file.add(self._findings(self._reading((length,))))
        else:
            if first and not any(self.tasks.values()):
                raise self._unfit(length)
            return ""
        for values in self.tasks.values():
            values.pop(length, None)
        return reason

    def _unfit(self, length: int) -> ArgumentError:
        reasons = "; ".join(dict.fromkeys(self.left_out.values()))
        return ArgumentError(
            "lengths",
            expected="a shortest length at which a task can be asked",
            got=f"{length}: {reasons}",
            remedy="Give longer --lengths, or another --text.",
        )

    def _asked(self, name: str, length: int) -> tuple[float, ...]:
        """The shares of right answers to the questions of a task."""
        examiner = self.examiner
        if examiner.encode is None:
            if name not in self.rates:
                examiner.rate = 1.0
                examiner.probe(self._probe(name))
            else:
                examiner.rate = self.rates[name]
        questions = self.maker.questions(name, length=length, count=self.count)
        began = time.perf_counter()
        with ThreadPoolExecutor(self.served.concurrency) as pool:
            asked = list(pool.map(examiner.ask, questions))
        self.seconds += time.perf_counter() - began
        used = [tokens for _, tokens in asked]
        self.tokens += sum(tokens or 0 for tokens in used)
        examiner.learn_rate(questions, used)
        self.rates[name] = examiner.rate
        return tuple(round(share, 5) for share, _ in asked)

    def _probe(self, name: str) -> Question:
        """A question that surely fits the shortest length, if one does."""
        try:
            return self.maker.questions(name, length=self.lengths[0], count=1)[0]
        except Unfit:
            task = TASKS[name]
            return task.make(self.maker.source, random.Random(0), task.fewest)

    def _learned(self, length: int) -> list[str]:
        """The tasks with surely more right answers than by guessing, at the shortest length."""
        return [n for n, v in self.tasks.items() if task_series(n, v).learned(length, ())]

    def _effective(self, lengths: Sequence[int]) -> Effective | None:
        """The effective length by all answers; None if no task is learned."""
        if not self._learned(lengths[0]):
            return None
        measured = {n: {m: v[m] for m in lengths if m in v} for n, v in self.tasks.items()}
        series = [task_series(name, values) for name, values in measured.items() if values]
        margin = self.settings.margin
        effective = effective_length(series, claimed=self.length, margin=margin)
        return effective if effective.abilities else None

    def _reading(self, lengths: Sequence[int]) -> StudyReading:
        """The answers as measurements."""
        tasks = {name: dict(sorted(v.items())) for name, v in self.tasks.items() if v}
        counted = [v for v in tasks.values() if all(n in v for n in lengths)]
        values = {n: tuple(chain.from_iterable(v[n] for v in counted)) for n in lengths}
        return StudyReading(
            right={n: fmean(shares) for n, shares in values.items()},
            per_second=self.tokens / self.seconds if self.seconds else 0.0,
            peak_memory_bytes=0,
            pieces={"right": values},
            tasks=tasks,
        )

    def _findings(self, reading: StudyReading) -> Findings:
        return Findings(key=KEY, role="baseline", untuned=reading)

    def _study(self, lengths: tuple[int, ...], effective: Effective | None) -> Study:
        learned = self._learned(lengths[0])
        name, first = self.endpoint.model, lengths[0]
        gate = (
            f"Nothing can be said of {name}: at {first} tokens it answers no task surely better "
            "than by guessing. Is --style that of the model, and are the lengths its own? A model "
            "that thinks needs --thinking TOKENS for it."
        )
        return Study(
            checkpoint=name,
            family=f"served at {self.endpoint.url}",
            parameters=0,
            length=self.length,
            factor=1.0,
            lengths=lengths,
            unit="token",
            text=self.text.name,
            sha256=self.text.sha256,
            findings=(self._findings(self._reading(lengths)),),
            sample="questions",
            trivial=0.0,
            trivial_rule="a guess",
            gate="" if learned else gate,
            effective=effective,
            style=self.examiner.style,
            left_out=self.left_out,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            device="the server's",
            threads=0,
            seed=self.settings.seed,
            **words("questions", count=self.count, tasks=len(learned)),
        )
