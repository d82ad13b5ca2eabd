"""Questions on texts of any length: RULER's thirteen tasks, JSON lookup, needles in other words.

Reference: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language
Models?", https://arxiv.org/abs/2404.06654. The tasks are built as there; texts, words and the
documents of both QA forms are posenc's or the user's, so that figures are not the paper's.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posenc.attention.user_cache import kept
from posenc.errors import UnknownNameError
from posenc.lab.codec import from_plain, to_plain
from posenc.lab.evaluation.questions.question import Question, QuestionTask, Source, Unfit
from posenc.lab.evaluation.questions.tasks import DOCUMENT_TASKS, NEEDLE_TASKS, TRACKING_TASKS
from posenc.lab.training.seeding import fingerprint

__all__ = ["TASKS", "Question", "QuestionMaker", "QuestionTask", "Unfit", "task_names"]

TASKS = {task.name: task for task in (*NEEDLE_TASKS, *TRACKING_TASKS, *DOCUMENT_TASKS)}
"""All tasks by name."""

ALL, NONE = "all", "none"

FULL = 0.95
"""A question that takes this share of the length is long enough."""

MOST_TRIES, GROWTH = 24, 8
"""Sizes tried for a question, and by how many times itself one may grow at once."""

VERSION = 1
"""Version of the questions; changing it draws all of them anew."""


def task_names(listed: str) -> tuple[str, ...]:
    """Names of tasks between commas; ``all`` or ``none`` of them.

    Raises:
        UnknownNameError: for an unknown one.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in TASKS and name not in (ALL, NONE):
            raise UnknownNameError.of("task", name, (*TASKS, ALL, NONE))
    if ALL in names:
        return tuple(TASKS)
    return tuple(name for name in dict.fromkeys(names) if name != NONE)


@dataclass(frozen=True)
class Questions:
    """The content of a kept file."""

    questions: tuple[Question, ...]


@dataclass(frozen=True)
class QuestionMaker:
    """Makes questions that fill a length.

    Args:
        source: of sentences.
        cost: tokens that a question takes with its answers.
        seed: of all random choices.
        identity: of the text, the tokenizer and the form of the questions, by which they are kept;
            "" keeps nothing.
    """

    source: Source
    cost: Callable[[Question], int]
    seed: int = 0
    identity: str = ""

    def questions(self, name: str, *, length: int, count: int) -> Sequence[Question]:
        """``count`` questions of a task, each of nearly ``length`` tokens and never more.

        The n-th asks for the same at every length, in another amount of text.

        Raises:
            Unfit: if the smallest question is longer, or the text does not serve.
        """
        if not self.source.sentences:
            raise Unfit("the text has no words")

        def make() -> tuple[Question, ...]:
            return tuple(self._fitted(TASKS[name], length, number) for number in range(count))

        if not self.identity:
            return make()
        digest = fingerprint(VERSION, self.identity, self.seed, name, length, count)[:32]
        file = f"{name}-{length}-{digest}.json.gz"
        return kept("questions", file, make, read=_questions, write=_content)

    def _fitted(self, task: QuestionTask, length: int, number: int) -> Question:
        """The largest of a question's sizes that fits, found by its tokens a unit."""

        def made(size: int) -> tuple[Question, int]:
            draw = random.Random(f"{self.seed}/{task.name}/{number}")
            question = task.make(self.source, draw, size)
            return question, self.cost(question)

        size = task.fewest
        best, taken = made(size)
        if taken > length:
            raise Unfit(f"no question fits {length} tokens")
        rate, above = taken / size, math.inf
        for _ in range(MOST_TRIES):
            if taken >= FULL * length or above == size + 1:
                break
            step = min(int((length - taken) / rate), GROWTH * size, (above - size) / 2)
            tried = size + max(1, int(step))
            question, tokens = made(tried)
            rate = max(1.0, (tokens - taken) / (tried - size))
            if tokens > length:
                above = tried
            else:
                best, taken, size = question, tokens, tried
        return best


def _content(questions: tuple[Question, ...]) -> bytes:
    return gzip.compress(json.dumps(to_plain(Questions(questions))).encode(), mtime=0)


def _questions(content: bytes) -> tuple[Question, ...]:
    return from_plain(Questions, json.loads(gzip.decompress(content))).questions
