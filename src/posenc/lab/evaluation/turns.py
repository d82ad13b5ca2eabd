"""Models that read the same contexts in turns: while time is left, and more may tell them apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from posenc.lab.evaluation.progress import PLANNED
from posenc.lab.evaluation.results import StudyReading
from posenc.lab.evaluation.suites.contexts import ContextSuite, MeasuredContext
from posenc.lab.evaluation.suites.reading import STEP, has_cache, read
from posenc.lab.experiments.text_loss import at_device, losses
from posenc.lab.reporting.numbers import counted, in_minutes
from posenc.transformers.live import LiveDecoder

SURE_FROM = 3
"""Contexts from which on a model may be settled."""

Unsettled = Callable[[dict[str, StudyReading], int], Collection[str]]
"""Names of the models that further contexts are to tell about, by the readings of all so far and
the number of times that this was asked."""


@dataclass(eq=False)
class Turns:
    """Models that read one context each, and then those in question the next one.

    Args:
        suite: of the contexts.
        models: by name.
        seconds: for all; None: no limit. Every model reads one context in any case.
        unsettled: asked after ``SURE_FROM`` contexts, and after each further one.
        report: called with what is going on, and the share of all that is done.
        contexts: those that models have read before, by name.
        keep: called with a model's contexts after each that it has read.
    """

    suite: ContextSuite
    models: Mapping[str, nn.Module]
    seconds: float | None
    unsettled: Unsettled
    report: Callable[[str, float], None]
    contexts: Mapping[str, Sequence[MeasuredContext]] = field(default_factory=dict)
    keep: Callable[[str, Sequence[MeasuredContext]], None] = lambda key, contexts: None

    def __post_init__(self) -> None:
        self.contexts = {key: tuple(self.contexts.get(key, ())) for key in self.models}
        self._took = dict.fromkeys(self.models, 0.0)
        self._looks, self._share = 0, 0.0

    def read(self) -> dict[str, StudyReading]:
        """The readings of all models, when time is over, or all are settled or have read all."""
        self._begin = time.monotonic()
        cached = {key: has_cache(model, self.suite.text) for key, model in self.models.items()}
        self.report(f"{PLANNED}{self._plan(cached)}", 0.0)
        count, rows, reading = self.suite.count, self.suite.rows, list(self.models)
        for first in range(0, count, rows):
            if first >= SURE_FROM:
                self._looks += 1
                wanted = self.unsettled(self._readings(), self._looks)
                reading = [key for key in reading if key in wanted]
            numbers = range(first, min(count, first + rows))
            for turn, key in enumerate(reading):
                if len(self.contexts[key]) > first:
                    continue
                if first and self._late(key):
                    return self._readings()
                since = time.monotonic()
                read = self.suite.contexts(
                    self.models[key],
                    numbers,
                    cached=cached[key],
                    seen=partial(self._seen, key, numbers, turn / len(reading), 1 / len(reading)),
                )
                self.contexts = {**self.contexts, key: (*self.contexts[key], *read)}
                self._took[key] = time.monotonic() - since
                self.keep(key, self.contexts[key])
        return self._readings()

    def _plan(self, cached: Mapping[str, bool]) -> str:
        """A sentence on what will be read, timed by a few tokens of the first model."""
        (first, model), longest = next(iter(self.models.items())), self.suite.lengths[-1]
        tokens = self.suite.text[: min(longest, STEP) + 1].long().unsqueeze(0)
        begin = time.monotonic()
        if cached[first]:
            assert isinstance(model, LiveDecoder)  # no others have one
            read(model, tokens)
        else:
            losses(at_device(model), tokens, last=1)
        each = (time.monotonic() - begin) * longest / (tokens.shape[1] - 1)
        several, count = len(self.models), self.suite.count
        plan = (
            f"{counted(several, 'model')} read{'s' * (several == 1)} contexts of {longest} tokens, "
            f"{in_minutes(several * each)} or more for one each"
        )
        if self.seconds is None:
            return f"{plan}, {count} each"
        affordable = max(1, min(count, int(self.seconds / several / max(each, 1e-9))))
        plan = f"{plan}; at most {affordable} each in {in_minutes(self.seconds)}"
        more = in_minutes(several * count * each)
        return plan if affordable == count else f"{plan}, all {count} in {more} or more"

    def _readings(self) -> dict[str, StudyReading]:
        most = max(self.contexts.values(), key=len)
        return {
            key: self.suite.reading(read, all_by=most, looks=self._looks)
            for key, read in self.contexts.items()
        }

    def _late(self, key: str) -> bool:
        """True if a model would read its next context beyond the end."""
        spent = time.monotonic() - self._begin + self._took[key]
        return self.seconds is not None and spent > self.seconds

    def _seen(self, key: str, numbers: range, turns: float, turn: float, tokens: int) -> None:
        """Report so many tokens of a turn, which is a share of a round as those before it are."""
        part, count = tokens / self.suite.lengths[-1], self.suite.count
        share = (numbers[0] + len(numbers) * (turns + turn * part)) / count
        if self.seconds is not None:
            spent, longest = time.monotonic() - self._begin, max(self._took.values())
            unread = sum(not read for read in self.contexts.values())  # all will read one
            end = max(self.seconds, spent + longest * max(0.0, unread - part))
            share = max(share, spent / end)
        self._share = min(1.0, max(self._share, share))
        self.report(f"{key}: reading context {numbers[-1] + 1}, step {tokens} tokens", self._share)
