"""Questions of all tasks to one model, and scores of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.lab.evaluation.questions import Question, QuestionMaker, task_names
from posenc.lab.evaluation.questions.question import Source
from posenc.lab.evaluation.settings import EvaluationSettings
from posenc.lab.evaluation.suites.needles import KeyNeedles
from posenc.lab.evaluation.suites.next_token import BUDGET
from posenc.lab.evaluation.texts import Text
from posenc.lab.experiments.sequences import stacked
from posenc.lab.experiments.text_loss import rows_a_call
from posenc.models import Greedy
from posenc.transformers.live import LiveDecoder

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


SPARE = 1.5
"""Tokens that may be generated, as a multiple of those of the expected answers."""

Encode = Callable[[str], Sequence[int]]
Item = TypeVar("Item")


class Examiner(Protocol):
    """A way to ask a model."""

    def cost(self, question: Question) -> int:
        """Tokens of a question with its answers."""

    def scores(self, model: nn.Module, questions: Sequence[Question]) -> list[float]:
        """Share of the answers of each question that the model gives."""


@dataclass(frozen=True)
class ByProbability:
    """Asks a base model: an answer counts if it is what greedy decoding would write.

    One pass over question and answers: each token of the answer has the highest log-probability,
    given all before it, earlier answers included.

    Args:
        encode: text to ids, without special tokens.
        begin: special ids that texts begin with.
    """

    encode: Encode
    begin: tuple[int, ...] = ()

    def cost(self, question: Question) -> int:
        """See ``Examiner``."""
        return len(self._ids(question)[0])

    def _ids(self, question: Question) -> tuple[list[int], list[int]]:
        """Ids of a question with its answers; where each answer begins, and the end."""
        head = [*self.begin, *self.encode(question.head)]
        count = len(question.answers)
        parts = [list(self.encode(question.answered(n))) for n in range(count + 1)]
        complete = parts[-1]
        ends = [_common(part, complete) for part in parts]
        return head + complete, [len(head) + end for end in ends]

    @torch.inference_mode()
    def scores(self, model: nn.Module, questions: Sequence[Question]) -> list[float]:
        """See ``Examiner``; shorter questions are padded behind, where nothing sees it."""
        device = next(model.parameters()).device
        asked = [self._ids(question) for question in questions]
        shares: list[float] = []
        for batch in _batches(asked, max(len(ids) for ids, _ in asked)):
            tokens = stacked([ids for ids, _ in batch], 0)
            longest = tokens.shape[1]
            last = longest - min(bounds[0] for _, bounds in batch) + 1
            guessed = _last_logits(model, tokens.to(device), last).argmax(-1).cpu()
            first = longest - last
            for (ids, bounds), guess in zip(batch, guessed, strict=True):
                right = [
                    guess[begin - 1 - first : end - 1 - first].tolist() == ids[begin:end]
                    for begin, end in pairwise(bounds)
                ]
                shares.append(sum(right) / len(right))
        return shares


@dataclass(frozen=True)
class ByGeneration:
    """Asks a chat model by its template: an answer counts if it stands in what is generated.

    The beginning of the answer is given, as in RULER.

    Args:
        encode, decode: text to ids and back.
        template: a user's message to the text up to the model's answer, special tokens included.
    """

    encode: Encode
    decode: Callable[[Sequence[int]], str]
    template: Callable[[str], str]

    def cost(self, question: Question) -> int:
        """See ``Examiner``."""
        return len(self._ids(question)) + self._most(question)

    def _ids(self, question: Question) -> list[int]:
        return list(self.encode(self.template(question.head + question.tail) + question.lead))

    def _most(self, question: Question) -> int:
        """Tokens to generate at most."""
        answers = self.encode(question.gap + ", ".join(question.answers))
        return int(SPARE * len(answers)) + 4

    def scores(self, model: nn.Module, questions: Sequence[Question]) -> list[float]:
        """See ``Examiner``; questions of equal length are asked together."""
        if not isinstance(model, LiveDecoder):
            raise ArgumentError(
                "style",
                expected="base, for a model that transformers does not generate with",
                got="chat",
                remedy="Use --style base.",
            )
        device = next(model.parameters()).device
        asked = sorted(
            ((self._ids(question), number) for number, question in enumerate(questions)),
            key=lambda pair: len(pair[0]),
        )
        scores: dict[int, float] = {}
        for length, group in groupby(asked, key=lambda pair: len(pair[0])):
            for batch in _batches(list(group), length):
                most = max(self._most(questions[number]) for _, number in batch)
                tokens = torch.tensor([ids for ids, _ in batch]).to(device)
                done = model.generate(tokens, most, Greedy())[:, length:].tolist()
                for (_, number), ids in zip(batch, done, strict=True):
                    written = self.decode(ids).lower()
                    answers = questions[number].answers
                    scores[number] = sum(a.lower() in written for a in answers) / len(answers)
        return [scores[number] for number in range(len(questions))]


def _last_logits(
    model: nn.Module, tokens: Int[Tensor, "B L"], last: int
) -> Float[Tensor, "B last V"]:
    """Logits after the last tokens; a model of transformers computes no others."""
    if isinstance(model, LiveDecoder):
        logits: Tensor = model(tokens, last=last)
    else:
        logits = model(tokens)
    return logits[:, -last:]


def _common(part: Sequence[int], whole: Sequence[int]) -> int:
    """Number of ids that two lists have in common from the first on."""
    pairs = enumerate(zip(part, whole, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(part), len(whole)))


def _batches(items: Sequence[Item], length: int) -> Iterator[Sequence[Item]]:
    rows = rows_a_call(length)
    return (items[begin : begin + rows] for begin in range(0, len(items), rows))
