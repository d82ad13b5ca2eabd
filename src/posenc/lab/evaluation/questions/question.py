"""Questions on a text, and their material: sentences of texts, words and identifiers."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

_ADJECTIVES = """
able ample amber ancient austere bashful bitter blank blunt bold brave brief bright brisk broad
calm candid chilly civil clear clever coarse cosy crimson crisp cubic curly damp dapper daring
deep dense dim distant dry dusty eager early easy elder empty even exact faint fair fancy fast
fertile fickle firm flat fleet fluent formal frank fresh frosty gentle giant glad golden grand
grave green hardy hasty hazy hidden hollow humble icy ideal idle jolly keen kind lavish lean level
light lively lofty loud loyal lucid lunar mellow merry mild modest narrow neat nimble noble opaque
oval pale patient placid plain polite proud quaint quick quiet rapid rare rigid robust rosy rough
round rural rustic sacred scarlet secret sharp shiny silent silver simple sleek slender slow
smooth sober solar solid sparse spare stable steady steep stern still sturdy subtle sudden sunny
swift tall tame tender tidy tiny tranquil upper urban vague vast vivid warm wary weary wide wild
wise witty wooden worthy young zealous
"""

_NOUNS = """
acorn anchor apron arch arrow atlas attic axle badge bakery ballad banner barley barn basin basket
beacon beaver bell bench bishop blanket bonnet bottle bridge brook broom bucket button cabin cable
canal candle canoe canvas carpet castle cedar cellar chapel cherry chimney cinder circus clinic
clock clover cobbler comet compass copper coral cottage cradle crane cricket crown curtain cushion
daisy diary dolphin donkey drawer drum eagle easel elbow engine falcon feather fence ferry fiddle
field flute forest fountain fox galaxy garden garlic gate glacier globe goblet gravel guitar
hammer harbour harvest hedge helmet heron hinge honey horn hotel island ivory jacket jewel jigsaw
kettle kitchen ladder lagoon lantern lemon letter library lizard locket lodge magnet mantle maple
marble market meadow medal melon mill mirror mitten monkey mountain museum mustard napkin needle
nest nickel notebook oak ocean olive orchard otter oven oyster paddle palace parcel parrot pasture
pebble pencil pepper piano pigeon pillow planet plough pocket pond poppy prairie pulley pumpkin
puzzle quarry quilt rabbit radish raven ribbon river robin rocket saddle salmon sandal saucer
scarf school shelf shovel signal spider spoon stable stamp statue stream sugar summit tailor
tavern teapot temple thimble thistle thunder ticket tower tractor trumpet tulip tunnel turnip
valley velvet vessel village violin wagon walnut walrus whistle willow window winter wizard yarn
zebra
"""

ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


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
