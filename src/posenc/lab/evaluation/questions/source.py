"""Sentences of a text, words and identifiers: the material of questions."""

from __future__ import annotations

import random
import re
import uuid
from dataclasses import dataclass
from functools import cached_property

from posenc.lab.evaluation.questions.lexicon import ADJECTIVES, NOUNS

FEWEST_WORDS = 5
"""Words of a sentence."""

CHUNK = 12
"""Words of a piece of a text without sentences."""

WORD = re.compile(r"[A-Za-z]{2,}")

NAMES = len(ADJECTIVES) * len(NOUNS)


@dataclass(frozen=True)
class Source:
    """A text as different sentences.

    Args:
        text: plain text, of any kind.
    """

    text: str

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Different sentences in their order; pieces of equal size of a text that has too few.

        Empty for a text without words.
        """
        split = (part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", self.text))
        sentences = dict.fromkeys(
            " ".join(part.split()) for part in split if len(WORD.findall(part)) >= FEWEST_WORDS
        )
        words = self.text.split()
        if sentences and len(sentences) >= min(2, len(words) // CHUNK):
            return tuple(sentences)
        chunks = (words[begin : begin + CHUNK] for begin in range(0, len(words), CHUNK))
        return tuple(dict.fromkeys(map(" ".join, chunks)))

    def run(self, begin: int, count: int) -> list[str]:
        """``count`` sentences from one on, from the first again after the last."""
        return [self.sentences[(begin + n) % len(self.sentences)] for n in range(count)]


def names(draw: random.Random, count: int) -> list[str]:
    """Different names such as ``silent-harbour``; numbered ones too where many are needed."""
    return [name(number) for number in draw.sample(range(max(NAMES, 2 * count)), count)]


def name(number: int) -> str:
    """The name of a number."""
    again, pair = divmod(number, NAMES)
    adjective, noun = divmod(pair, len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}" + f"-{again + 1}" * bool(again)


def digits(draw: random.Random, count: int = 7) -> str:
    """A number of so many digits."""
    return str(draw.randrange(10 ** (count - 1), 10**count))


def identifier(draw: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def letters(draw: random.Random, alphabet: str, size: int, count: int) -> list[str]:
    """Different random words of ``size`` letters."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(draw.choices(alphabet, k=size))] = None
    return list(words)


def scattered(draw: random.Random, sentences: list[str], inserted: list[str]) -> list[str]:
    """Sentences with others between them, in their order, at random places."""
    places = sorted(draw.randint(0, len(sentences)) for _ in inserted)
    mixed = list(sentences)
    for place, text in zip(reversed(places), reversed(inserted), strict=True):
        mixed.insert(place, text)
    return mixed
