"""Tasks that follow or count over the whole text: variables, common and frequent words."""

from __future__ import annotations

import random
import string

from posenc.lab.evaluation.questions.needles import NOISE
from posenc.lab.evaluation.questions.question import Question, QuestionTask
from posenc.lab.evaluation.questions.source import Source, digits, letters, names, scattered

HOPS = 4
"""Assignments after the first."""

COMMON = 10
"""Words to be found in ``cwe``."""

LONG, SHORT = (30, 3), (6, 1)
"""Occurrences of common and other words in ``cwe``, in long lists and in short ones."""

LONG_LIST = 1200
"""Entries from which on a list is long."""

FREQUENT = 3
"""Words to be found in ``fwe``."""

ZETA_2 = 1.6449340668482264
"""Σ k⁻²."""


def variables(source: Source, draw: random.Random, size: int) -> Question:
    """Variables of one value, each assigned the one before it; see ``QuestionTask.make``."""
    shown, shown_lines, shown_value = _chain(draw, 2)
    chain, lines, value = _chain(draw, HOPS)
    text = "\n".join(scattered(draw, [NOISE] * size, lines))
    example = "\n".join(scattered(draw, [NOISE] * 2, shown_lines))
    answered = f"{_asked_of(shown_value)}{_begun(shown_value, len(shown))} {', '.join(shown)}"
    intro = "Follow the assignments of variables in the text."
    return Question(
        head=f"{intro}\n\n{example}\n{answered}\n\n{intro}\n\n{text}\n",
        tail=_asked_of(value),
        lead=_begun(value, len(chain)),
        answers=tuple(chain),
    )


def _chain(draw: random.Random, hops: int) -> tuple[list[str], list[str], str]:
    """Variables, their assignments, and the value of all."""
    names = letters(draw, string.ascii_uppercase, 5, hops + 1)
    value = digits(draw, 5)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {names[n + 1]} = VAR {names[n]}." for n in range(hops)]
    return names, lines, value


def _asked_of(value: str) -> str:
    return f"Question: Which variables have the value {value}, in the order of assignment?"


def _begun(value: str, count: int) -> str:
    return f" Answer: The {count} variables with the value {value} are"


def common_words(source: Source, draw: random.Random, size: int) -> Question:
    """The ten words that a list of ``size`` entries repeats most; see ``QuestionTask.make``."""
    example, shown = _numbered(draw, names(draw, COMMON), names(draw, COMMON), SHORT)
    common, times = names(draw, COMMON), LONG if size >= LONG_LIST else SHORT
    count = (size - COMMON * times[0]) // times[1]
    others = [word for word in names(draw, count + COMMON) if word not in common][:count]
    text, answers = _numbered(draw, common, others, times)
    asked = f"Question: Which {COMMON} words stand there most often, in alphabetical order?"
    lead = " Answer: They are"
    intro = "Some words of this numbered list stand there more often than others. Remember these."
    return Question(
        head=f"{intro}\n{example}\n{asked}{lead} {', '.join(shown)}\n\n{intro}\n{text}\n",
        tail=asked,
        lead=lead,
        answers=tuple(answers),
    )


def _numbered(
    draw: random.Random, common: list[str], others: list[str], times: tuple[int, int]
) -> tuple[str, list[str]]:
    """A numbered list of words, and the common ones in alphabetical order."""
    words = common * times[0] + others * times[1]
    draw.shuffle(words)
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, 1)), sorted(common)


def frequent_words(source: Source, draw: random.Random, size: int) -> Question:
    """The three most frequent coded words, with frequencies of k⁻²; see ``QuestionTask.make``.

    The most frequent of all is a row of dots, which does not count.
    """
    counts: list[int] = []
    while count := int(size / ZETA_2 / (len(counts) + 1) ** 2):
        counts.append(count)
    coded = letters(draw, string.ascii_lowercase, 6, len(counts) - 1)
    words = [
        word for word, count in zip(["...", *coded], counts, strict=True) for _ in range(count)
    ]
    draw.shuffle(words)
    return Question(
        head="Count how often each coded word occurs in the following text. Dots do not count.\n"
        + " ".join(words)
        + "\n",
        tail=f"Question: Which {FREQUENT} coded words occur most often, the most frequent first?",
        lead=" Answer: They are",
        answers=tuple(coded[:FREQUENT]),
    )


TRACKING_TASKS = (
    QuestionTask(name="vt", summary="variables of one value", make=variables),
    QuestionTask(name="cwe", summary="the ten most common words", make=common_words, fewest=70),
    QuestionTask(
        name="fwe", summary="the three most frequent words", make=frequent_words, fewest=100
    ),
)
