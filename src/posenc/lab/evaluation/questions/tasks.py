"""Tasks of questions: needles in a haystack, documents, and what runs through the whole text."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posenc.lab.evaluation.questions.question import (
    Question,
    QuestionTask,
    Source,
    Unfit,
    digits,
    identifier,
    letters,
    names,
    scattered,
)
from posenc.lab.reporting.numbers import listed

NOISE = (
    "The field is quiet. Rain falls on the roof. A clock ticks on the wall. Nothing else happens. "
    "Then it all begins again."
)
"""One unit of text without content."""

Value = Callable[[random.Random], str]

NEEDLE = "The secret {kind} of {key} is {value}."


@dataclass(frozen=True, kw_only=True)
class Needles:
    """A form of needles; see ``QuestionTask.make``.

    Args:
        hay: repeated noise, sentences of the text, or further needles.
        key, value: how both are drawn.
        kind: of the value, in a word.
        keys, values, asked: number of keys, of values a key, and of keys asked for.
    """

    hay: Literal["noise", "text", "needles"]
    key: Literal["name", "uuid"] = "name"
    value: Value = digits
    kind: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def __call__(self, source: Source, draw: random.Random, size: int) -> Question:
        keys = self._keys(draw, self.keys)
        values = {key: [self.value(draw) for _ in range(self.values)] for key in keys}
        asked = draw.sample(keys, self.asked)
        needles = [(key, value) for key in keys for value in values[key]]
        draw.shuffle(needles)
        if self.hay == "noise":
            hay = [NOISE] * size
        elif self.hay == "text":
            hay = source.run(draw.randrange(len(source.sentences)), size)
        else:
            others = (key for key in self._keys(draw, size + 1) if key not in values)
            hay = [self._needle(key, self.value(draw)) for key in others][:size]
        text = scattered(draw, hay, [self._needle(*pair) for pair in needles])
        answers = tuple(value for key in asked for named, value in needles if named == key)
        many = "s" * (len(answers) > 1)
        about = f"the secret {self.kind}{many} of {listed(asked)}"
        order = ", in this order" * (self.asked > 1) + ", in the order of the text" * (
            self.values > 1
        )
        return Question(
            head=f"Secret {self.kind}s are hidden in the following text. Remember them.\n\n"
            + ("\n" if self.hay != "text" else " ").join(text)
            + "\n\n",
            tail=f"Question: What {'are' if many else 'is'} {about}{order}?",
            lead=f" Answer: {about[0].upper()}{about[1:]} {'are' if many else 'is'}",
            answers=answers,
        )

    def _keys(self, draw: random.Random, count: int) -> list[str]:
        if self.key == "name":
            return names(draw, count)
        return [identifier(draw) for _ in range(count)]

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.kind, key=key, value=value)


FACTS = (
    ("{name} mends lifts on the Eiffel Tower.", "Who works in Paris?"),
    ("{name} paints the Golden Gate Bridge every spring.", "Who has a job in San Francisco?"),
    ("{name} sells postcards beside the Colosseum.", "Who earns a living in Rome?"),
    ("{name} winds the clock called Big Ben.", "Who is employed in London?"),
    ("{name} guides tourists around the Parthenon.", "Who makes money in Athens?"),
    ("{name} tunes pianos at the Bolshoi.", "Who can be met in Moscow?"),
    ("{name} cleans windows of the Burj Khalifa.", "Who has been to Dubai?"),
    ("{name} rows visitors past the Rialto bridge.", "Who knows Venice well?"),
    ("{name} never eats meat, fish or eggs.", "Who lives as a vegan?"),
    ("{name} cannot hear a single sound.", "Who is deaf?"),
    ("{name} fills cavities and straightens teeth.", "Who has become a dentist?"),
    ("{name} puts out burning houses.", "Who is with a fire brigade?"),
    ("{name} teaches calculus to pupils.", "Who knows mathematics?"),
    ("{name} bakes croissants before dawn.", "Who gets up very early?"),
    ("{name} owns eleven cats.", "Who keeps pets?"),
    ("{name} steers a Boeing across oceans.", "Who has learned to fly?"),
)
"""Facts, and questions that ask for them in other words."""

_PEOPLE = """
Agnes Bertil Carmen Dragan Eluned Farid Gudrun Hamish Ingrid Jorge Katya Leander Mirela Nnamdi Oskar
Petra Quentin Ruslan Sanna Tobias Ulrike Viktor Wanda Xenia Yusuf Zelda
"""

PEOPLE = tuple(_PEOPLE.split())


def in_other_words(source: Source, draw: random.Random, size: int) -> Question:
    """A fact in the text, asked for without any of its words; see ``QuestionTask.make``."""
    fact, question = draw.choice(FACTS)
    person = draw.choice(PEOPLE)
    hay = source.run(draw.randrange(len(source.sentences)), size)
    text = scattered(draw, hay, [fact.format(name=person)])
    return Question(
        head="Read the following text. It mentions a person by first name.\n\n"
        + f"{' '.join(text)}\n\n",
        tail=f"Question: {question}",
        lead=" Answer:",
        answers=(person,),
    )


NEEDLE_TASKS = tuple(
    QuestionTask(name=name, summary=summary, make=make)
    for name, summary, make in (
        ("niah_single_1", "a number in repeated noise", Needles(hay="noise")),
        ("niah_single_2", "a number in the text", Needles(hay="text")),
        (
            "niah_single_3",
            "a UUID in the text",
            Needles(hay="text", value=identifier, kind="identifier"),
        ),
        ("niah_multikey_1", "one of four numbers in the text", Needles(hay="text", keys=4)),
        ("niah_multikey_2", "one of all the numbers", Needles(hay="needles")),
        (
            "niah_multikey_3",
            "one of all the UUIDs, by a UUID",
            Needles(hay="needles", key="uuid", value=identifier, kind="identifier"),
        ),
        ("niah_multivalue", "four numbers of one key", Needles(hay="text", values=4)),
        ("niah_multiquery", "the numbers of four keys", Needles(hay="text", keys=4, asked=4)),
        ("other_words", "a fact asked for in other words", in_other_words),
    )
)


PASSAGE = 4
"""Sentences of a document."""

SHORTEST = 5
"""Letters of a word that is left out."""

GAP = "____"

INSTRUCTIONS = "Answer the question by the following documents. Give the answer alone."


def missing_word(source: Source, draw: random.Random, size: int) -> Question:
    """The word left out of a sentence of one document; see ``QuestionTask.make``."""
    passage, others = _passages(source, draw, 1, size)
    sentences = [text for text in passage[0] if _words(text)]
    if not sentences:
        raise Unfit("the text has no long words")
    sentence = draw.choice(sentences)
    word = draw.choice(_words(sentence))
    gapped = re.sub(rf"\b{word}\b", GAP, sentence)
    texts = [" ".join(passage[0]), *others]
    draw.shuffle(texts)
    titles = names(draw, len(texts))
    return _asked(
        list(zip(titles, texts, strict=True)), f"Which word is missing in “{gapped}”?", (word,)
    )


def second_document(source: Source, draw: random.Random, size: int) -> Question:
    """The beginning of a document that another one refers to; see ``QuestionTask.make``."""
    passages, others = _passages(source, draw, 2, size)
    title = names(draw, 1)[0]
    quoted = draw.choice(passages[0])
    answer = " ".join(passages[1][0].split()[:3])
    first = " ".join([*passages[0], f"This goes on in {title}."])
    texts = [first, " ".join(passages[1]), *others]
    titles = names(draw, len(texts) + 1)
    titles = [other for other in titles if other != title][: len(texts)]
    titles[1] = title
    documents = list(zip(titles, texts, strict=True))
    draw.shuffle(documents)
    return _asked(
        documents,
        "What are the first three words of the document that continues the one which says "
        f"“{quoted}”?",
        (answer,),
    )


def _passages(
    source: Source, draw: random.Random, count: int, size: int
) -> tuple[list[list[str]], list[str]]:
    """Sentences of the documents that are asked about, and the others, ``size`` in all."""
    total = len(source.sentences) // PASSAGE
    if total < count + 1:
        raise Unfit(f"the text has {total} documents of {PASSAGE} different sentences")
    chosen = draw.sample(range(total), count)
    rest = [number for number in range(total) if number not in chosen]
    begin = draw.randrange(len(rest))
    numbers = [rest[(begin + n) % len(rest)] for n in range(max(0, size - count))]
    read = {n: source.run(n * PASSAGE, PASSAGE) for n in {*chosen, *numbers}}
    return [read[n] for n in chosen], [" ".join(read[n]) for n in numbers]


def _words(sentence: str) -> list[str]:
    """Long words of a sentence that occur in it once."""
    words = re.findall(rf"\b[A-Za-z]{{{SHORTEST},}}\b", sentence)
    return [word for word in words if len(re.findall(rf"\b{word}\b", sentence)) == 1]


def _asked(documents: list[tuple[str, str]], question: str, answers: tuple[str, ...]) -> Question:
    listed = "\n\n".join(f"Document {title}:\n{text}" for title, text in documents)
    return Question(
        head=f"{INSTRUCTIONS}\n\n{listed}\n\n{INSTRUCTIONS}\n\n",
        tail=f"Question: {question}",
        lead=" Answer:",
        answers=answers,
    )


def json_lookup(source: Source, draw: random.Random, size: int) -> Question:
    """The value of a key in a JSON object of UUIDs (Liu et al. 2024); see ``QuestionTask.make``."""
    key, value = identifier(draw), identifier(draw)
    depth = draw.random()
    pairs = [(identifier(draw), identifier(draw)) for _ in range(size - 1)]
    pairs.insert(round(depth * len(pairs)), (key, value))
    listed = ",\n".join(f'  "{name}": "{held}"' for name, held in pairs)
    return Question(
        head=f"Look up the value of a key in this JSON object.\n\n{{\n{listed}\n}}\n\n",
        tail=f'Question: What is the value of the key "{key}"?',
        lead=f' Answer: "{key}": "',
        answers=(value,),
        gap="",
    )


DOCUMENT_TASKS = (
    QuestionTask(name="qa_1", summary="a word missing in one of the documents", make=missing_word),
    QuestionTask(
        name="qa_2", summary="a document that another one names", make=second_document, fewest=2
    ),
    QuestionTask(name="json_lookup", summary="a value in a JSON object of UUIDs", make=json_lookup),
)


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
