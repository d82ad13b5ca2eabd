"""Needles in a haystack: RULER's eight forms, and one that shares no words with its question."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posenc.lab.evaluation.questions.question import Question, QuestionTask
from posenc.lab.evaluation.questions.source import Source, digits, identifier, names, scattered
from posenc.lab.reporting.sentences import listed

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
