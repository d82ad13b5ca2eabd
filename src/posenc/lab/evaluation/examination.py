"""Questions of all tasks to one model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from posenc.errors import ArgumentError
from posenc.lab.evaluation.questions import QuestionMaker, task_names
from posenc.lab.evaluation.questions.source import Source
from posenc.lab.evaluation.scoring import ByGeneration, ByProbability, Encode, Examiner
from posenc.lab.evaluation.settings import EvaluationSettings
from posenc.lab.evaluation.suites.needles import KeyNeedles
from posenc.lab.evaluation.suites.next_token import BUDGET
from posenc.lab.evaluation.texts import Text

FEWEST, MOST = 8, 64
"""Questions of a task and length by default."""

DISTINCT_TEXTS = ("7310542", "1864390"), ("Agnes", "Bertil"), ("amber", "cedar")
"""Pairs of answers that a tokenizer must encode differently."""


@dataclass(frozen=True)
class Examination:
    """Questions to one model, in its own form.

    Args:
        style: ``base`` or ``chat``; "" if nothing is asked.
        names: tasks.
        maker, examiner: of the questions.
        count: a task and length.
        refusal: why nothing is asked.
    """

    style: str
    names: tuple[str, ...] = ()
    maker: QuestionMaker | None = None
    examiner: Examiner | None = None
    count: int = 0
    refusal: str = ""

    @classmethod
    def of(cls, text: Text, settings: EvaluationSettings, *, goal: int) -> Examination:
        """The questions by the settings, of a text.

        Args:
            text: to make them of, with its tokenizer.
            settings: tasks, number and style of questions.
            goal: the longest length.

        Raises:
            ArgumentError: if a chat model is asked for, and there is no chat template.
        """
        names, tokenizer = task_names(settings.tasks), text.tokenizer
        chat = None if tokenizer is None else tokenizer.chat
        if settings.style == "chat" and chat is None:
            raise ArgumentError(
                "style",
                expected="base, for a tokenizer without a chat template",
                got="chat",
                remedy="Save the tokenizer with its chat_template into the folder.",
            )
        if not names:
            return cls("")
        encode: Encode = str.encode  # ids are bytes
        if isinstance(text.needles, KeyNeedles):
            encode = text.needles.encode
        if any(list(encode(one)) == list(encode(other)) for one, other in DISTINCT_TEXTS):
            return cls("", refusal="its tokenizer does not tell words or numbers apart")
        style = "base"
        examiner: Examiner = ByProbability(encode, text.special.begin)
        if chat is not None and tokenizer is not None and settings.style != "base":
            style = "chat"
            examiner = ByGeneration(encode, tokenizer.decode, chat)
        identity = ""
        if tokenizer is not None:
            form = chat("") if chat is not None and style == "chat" else ""
            identity = repr((tokenizer.identity, text.sha256, text.special.begin, style, form))
        source = Source(text.plain)
        maker = QuestionMaker(source, examiner.cost, settings.seed, identity)
        count = settings.questions or min(MOST, max(FEWEST, BUDGET // goal))
        return cls(style, names, maker, examiner, count)

    def ask(self, model: nn.Module, name: str, length: int) -> tuple[float, ...]:
        """Share of right answers for each question of a task.

        Raises:
            Unfit: if there are no such questions of this length.
        """
        assert self.maker is not None  # as there are names
        assert self.examiner is not None
        questions = self.maker.questions(name, length=length, count=self.count)
        return tuple(round(share, 5) for share in self.examiner.scores(model, questions))
