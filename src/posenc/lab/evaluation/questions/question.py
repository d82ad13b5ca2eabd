"""A question on a text, and the tasks that make such questions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from posenc.lab.evaluation.questions.source import Source


class Unfit(Exception):
    """The task cannot be made of this text or at this length; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question on a text, to be answered by continuing it.

    Args:
        head: instructions and text, up to the last line break.
        tail: the question.
        lead: beginning of the answer, which continues the question.
        answers: expected, in the order that the question asks for.
        gap: characters before the first answer; ", " separates the others.
    """

    head: str
    tail: str
    lead: str
    answers: tuple[str, ...]
    gap: str = " "

    def answered(self, count: int) -> str:
        """Question, beginning of the answer and the first ``count`` answers."""
        return self.tail + self.lead + (self.gap + ", ".join(self.answers[:count])) * bool(count)


Make = Callable[[Source, random.Random, int], Question]
"""A question of a text, random choices and a size in units of the task (sentences, words, …).

Whatever is asked for is drawn before anything whose amount depends on the size, so that the same
seed asks for the same at every length.
"""


@dataclass(frozen=True, kw_only=True)
class QuestionTask:
    """A kind of question.

    Args:
        name: of the task; RULER's own where it is one of RULER's.
        summary: of the task, in a phrase.
        make: makes a question.
        fewest: smallest size.
    """

    name: str
    summary: str
    make: Make
    fewest: int = 1
