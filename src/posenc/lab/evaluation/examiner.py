"""Questions to a served model, and how its answers are scored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

from posenc.errors import ArgumentError
from posenc.lab.evaluation.endpoint import Endpoint, EndpointError
from posenc.lab.evaluation.questions import Question
from posenc.lab.evaluation.scoring import SPARE
from posenc.lab.evaluation.texts import Encode, TokenizerFile

REFUSED = (400, 404, 405, 413, 422, 500, 501)
"""Statuses of what a server does not do: another path, log-probabilities, a longer context."""

ROUNDED = 1.02
"""Tokens that are allowed for, as a multiple of what the server's counts let expect."""

COUNTING = "1 2 3 4 5 6 7 8 9 10 11 12"
"""A text that any model continues, by which log-probabilities are tried."""

PREFACE = 16
"""Tokens that a chat model may write before its answer, beside the words of the question."""

FIRST = 8
"""Tokens of the first answer, among them those of ``THINK``."""

THOUGHT = 1024
"""Tokens that a chat model that thinks may think before its answer, by default."""

THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of a message with the thought that the server has taken from its text."""

THINK, THOUGHT_END = "<think>", "</think>"
"""Marks of a thought that the server leaves in the text; a template may have written the first."""


class ServedExaminer:
    """Asks a served model.

    Args:
        endpoint: of the model.
        style: ``base``, ``chat`` or ``auto``: ``chat`` where the server answers messages.
        tokenizer: of the model; None: tokens are estimated from the server's counts.
        thinking: tokens that a chat model may think before its answer; None: ``THOUGHT`` where its
            first answer shows a thought.

    Raises:
        ArgumentError: if nothing counts tokens.
        EndpointError: if the server does not answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        style: str,
        tokenizer: TokenizerFile | None,
        thinking: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.encode: Encode | None = None if tokenizer is None else tokenizer.encode
        self.style, answer = self._tried(style, tokenizer)
        self.thinking = thinking or 0
        if thinking is None and self.style == "chat" and thinks(answer):
            self.thinking = THOUGHT
        self.rate = 1.0
        used = prompt_tokens(answer)
        if used is None and self.encode is None:
            raise ArgumentError(
                "tokenizer",
                expected="a folder with its tokenizer.json, as the server counts no tokens",
                got="none",
                remedy="Name that of the model.",
            )
        self.overhead = max(0, (used or 0) - (1 if self.encode is None else self._count("a")))

    def _tried(self, style: str, tokenizer: TokenizerFile | None) -> tuple[str, dict[str, Any]]:
        """The style that the server serves, and its first answer."""
        bare = tokenizer is not None and tokenizer.chat is None
        if style == "chat" or (style == "auto" and not bare):
            try:
                return "chat", self.endpoint.chat("a", FIRST, tries=1 if style == "auto" else None)
            except EndpointError as error:
                if style == "chat" or error.status not in REFUSED:
                    raise
        answer = self.endpoint.complete("a", 1)
        return ("base" if self._echoes() else "written"), answer

    def _echoes(self) -> bool:
        """True if the server calls its own greedy continuation of a prompt the likeliest.

        Some give no log-probabilities of prompts, some those of the token before.
        """
        text = self.endpoint.complete(COUNTING, 4)["choices"][0].get("text")
        if not isinstance(text, str) or not text:
            return False
        own = Question(head=COUNTING, tail="", lead="", answers=(text,), gap="")
        try:
            echoed = self.endpoint.complete(COUNTING + text, 1, echo=True, tries=1)
        except EndpointError as error:
            if error.status not in REFUSED:
                raise
            return False
        return likeliest(echoed, own) == [True]

    def _count(self, text: str) -> int:
        """Tokens of a text, estimated by its characters where there is no tokenizer."""
        if self.encode is not None:
            return len(self.encode(text))
        return math.ceil(ROUNDED * self.rate * len(text))

    def cost(self, question: Question) -> int:
        """Tokens of a question with its answers."""
        most = 1 if self.style == "base" else self._most(question)
        return self.overhead + self._count(self._prompt(question)) + most

    def _prompt(self, question: Question) -> str:
        """The text that is sent."""
        if self.style == "chat":
            return question.head + question.tail
        answers = len(question.answers) if self.style == "base" else 0
        return question.head + question.answered(answers)

    def _most(self, question: Question) -> int:
        """Tokens to generate at most."""
        text = question.gap + ", ".join(question.answers)
        if self.encode is not None:
            expected = len(self.encode(text))
        else:  # digits and signs may be tokens of their own
            letters = sum(map(str.isalpha, text))
            expected = len(text) - letters + math.ceil(min(1.0, 2 * self.rate) * letters)
        preface = self.thinking + self._count(question.lead) + PREFACE
        preface = preface if self.style == "chat" else 0
        return int(SPARE * expected) + 4 + preface

    def learn_rate(self, questions: Iterable[Question], used: Iterable[int | None]) -> None:
        """Take the tokens a character from what the server counted of questions."""
        rates = [
            (tokens - self.overhead) / len(self._prompt(question))
            for question, tokens in zip(questions, used, strict=True)
            if tokens is not None
        ]
        self.rate = max(rates, default=self.rate)

    def probe(self, question: Question) -> None:
        """Learn the tokens a character of a task by one question, which is not scored."""
        prompt = self._prompt(question)
        chat = self.style == "chat"
        answer = self.endpoint.chat(prompt, 1) if chat else self.endpoint.complete(prompt, 1)
        self.learn_rate([question], [prompt_tokens(answer)])

    def ask(self, question: Question) -> tuple[float, int | None]:
        """The share of the answers that are right, and the tokens of the prompt."""
        prompt = self._prompt(question)
        if self.style == "chat":
            answer = self.endpoint.chat(prompt, self._most(question))
            text = answer_text(answer, thinking=self.thinking > 0)
            return written_share(text, question), prompt_tokens(answer)
        if self.style == "base":
            answer = self.endpoint.complete(prompt, 1, echo=True)
            right = likeliest(answer, question)
            if right is not None:
                return fmean(right), prompt_tokens(answer)
            prompt = question.head + question.answered(0)  # its tokens do not spell the answers
        answer = self.endpoint.complete(prompt, self._most(question))
        text = _text(answer["choices"][0].get("text"))
        return written_share(text, question), prompt_tokens(answer)


def written_share(text: str, question: Question) -> float:
    """The share of a question's answers that stand in a text."""
    found = [answer.lower() in text.lower() for answer in question.answers]
    return fmean(found)


def thinks(answer: Mapping[str, Any]) -> bool:
    """True if a message shows a thought, in a field of its own or at the start of its text."""
    message = _message(answer)
    text = _text(message.get("content"))
    begun = text.lstrip().startswith(THINK) or THOUGHT_END in text
    return begun or any(_text(message.get(name)) for name in THOUGHTS)


def answer_text(answer: Mapping[str, Any], *, thinking: bool = False) -> str:
    """The text of a chat model's message without the thought before it; "" if that has no end.

    Args:
        answer: to ``Endpoint.chat``.
        thinking: the model thinks. A text without a mark that ends for its length is then a thought
            whose beginning the template has written, unless the thought is in a field of its own.
    """
    message = _message(answer)
    _, ended, text = _text(message.get("content")).rpartition(THOUGHT_END)
    if ended:
        return text
    apart = any(_text(message.get(name)) for name in THOUGHTS)
    cut = answer["choices"][0].get("finish_reason") == "length"
    return "" if text.lstrip().startswith(THINK) or (thinking and cut and not apart) else text


def _message(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    message = answer["choices"][0].get("message")
    return message if isinstance(message, dict) else {}


def _text(value: object) -> str:
    """A field's text; "" if it holds none."""
    return value if isinstance(value, str) else ""


def prompt_tokens(answer: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt, as a server counts them; None: it does not."""
    usage = answer.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return counted if isinstance(counted, int) and counted > 0 else None


def likeliest(answer: Mapping[str, Any], question: Question) -> list[bool] | None:
    """For each answer in an echoed prompt, if every token that it touches is the likeliest.

    Args:
        answer: to ``Endpoint.complete`` with ``echo``.
        question: whose answers end the prompt.

    Returns:
        None if these log-probabilities were not given.
    """
    given = answer["choices"][0].get("logprobs")
    given = given if isinstance(given, dict) else {}
    columns = [given.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
    tokens, values, tops = (column if isinstance(column, list) else [] for column in columns)
    if not len(tokens) == len(values) == len(tops) or not all(isinstance(t, str) for t in tokens):
        return None
    counts = range(1, len(question.answers) + 1)
    answered = [question.gap + ", ".join(question.answers[:count]) for count in counts]
    begin = "".join(tokens).rfind(answered[-1])
    if begin < 0:
        return None
    bounds = [begin, *(begin + len(text) for text in answered)]
    right = [True] * len(answered)
    position = 0
    for token, value, top in zip(tokens, values, tops, strict=True):
        first, position = position, position + len(token)
        for number, (start, end) in enumerate(pairwise(bounds)):
            if first < end and position > start:
                others = [*top.values()] if isinstance(top, dict) else []
                if not others or not all(isinstance(one, float | int) for one in (value, *others)):
                    return None
                right[number] &= value >= max(others)
    return right
