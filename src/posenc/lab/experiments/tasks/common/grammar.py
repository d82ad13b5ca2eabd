"""Sentences in pairs of the same words, with agent and patient exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

PEOPLE = ("man", "woman", "boy", "girl", "farmer", "teacher", "doctor", "sailor", "nurse", "king")
ANIMALS = ("dog", "cat", "horse", "goat", "fox", "bear", "goose", "donkey", "wolf", "sheep")
VERBS = ("chased", "followed", "watched", "helped", "scared", "carried", "pushed", "washed")
ADJECTIVES = ("old", "young", "small", "big", "tired", "quiet", "happy", "hungry")
PREPOSITIONS = ("near", "behind", "beside")
PLACES = ("river", "house", "garden", "bridge", "tree", "road")
LITTLE = ("the", "that", "was", "by")

WORDS: tuple[str, ...] = (*LITTLE, *PEOPLE, *ANIMALS, *VERBS, *ADJECTIVES, *PREPOSITIONS, *PLACES)
"""Words of the vocabulary."""

SHORTEST = 5
"""Words of the shortest sentence: the dog chased the man."""

PASSIVE = 0.3
"""Share of clauses in the passive voice, which turns round who acts."""


@dataclass
class Phrase:
    """``the ADJECTIVE… NOUN (near the PLACE) (that …)``."""

    noun: str
    adjectives: list[str] = field(default_factory=list)
    place: tuple[str, str] | None = None
    relative: Relative | None = None

    def words(self) -> list[str]:
        place = [] if self.place is None else [self.place[0], "the", self.place[1]]
        relative = [] if self.relative is None else self.relative.words()
        return ["the", *self.adjectives, self.noun, *place, *relative]


@dataclass
class Relative:
    """``that VERB the …``, ``that was VERB by the …`` or ``that the … VERB``."""

    verb: str
    kind: str
    other: Phrase

    def words(self) -> list[str]:
        if self.kind == "object":
            return ["that", *self.other.words(), self.verb]
        return ["that", *_verb(self.verb, self.kind), *self.other.words()]


@dataclass
class Scene:
    """A main clause about a person and an animal.

    Args:
        first, second: its noun phrases, one of each kind.
        verb: between them.
        kind: ``"active"`` or ``"passive"``.
    """

    first: Phrase
    second: Phrase
    verb: str
    kind: str

    def words(self) -> list[str]:
        """The sentence."""
        return [*self.first.words(), *_verb(self.verb, self.kind), *self.second.words()]

    @property
    def person_acts(self) -> bool:
        """True if the person is the agent."""
        actor = self.first if self.kind == "active" else self.second
        return actor.noun in PEOPLE

    def turned(self) -> Scene:
        """The scene with person and animal exchanged, and everything else in place."""
        first, second = self.first, self.second
        return Scene(
            Phrase(second.noun, first.adjectives, first.place, first.relative),
            Phrase(first.noun, second.adjectives, second.place, second.relative),
            self.verb,
            self.kind,
        )


def draw_scene(length: int, random: Random) -> Scene:
    """A scene whose sentence has exactly ``length`` words, ``SHORTEST`` or more."""
    nouns = [random.choice(PEOPLE), random.choice(ANIMALS)]
    random.shuffle(nouns)
    phrases = [Phrase(noun) for noun in nouns]
    passive = length >= SHORTEST + 2 and random.random() < PASSIVE
    kind = "passive" if passive else "active"
    scene = Scene(phrases[0], phrases[1], random.choice(VERBS), kind)
    left = length - SHORTEST - 2 * passive
    while left:
        left -= _grown(phrases, left, random)
    return scene


def _grown(phrases: list[Phrase], budget: int, random: Random) -> int:
    """Make a phrase longer by at most ``budget`` words; returns the number added."""
    phrase = random.choice(phrases)
    kinds: Sequence[str] = [
        kind
        for kind, words in (("active", 4), ("object", 4), ("passive", 6))
        if words <= budget and phrase.relative is None
    ]
    fate = random.random()
    if kinds and fate < 0.5:
        kind = random.choice(kinds)
        other = Phrase(random.choice(PEOPLE + ANIMALS))
        phrase.relative = Relative(random.choice(VERBS), kind, other)
        phrases.append(other)
        return 6 if kind == "passive" else 4
    if budget >= 3 and phrase.place is None and fate < 0.8:
        phrase.place = random.choice(PREPOSITIONS), random.choice(PLACES)
        return 3
    phrase.adjectives.append(random.choice(ADJECTIVES))
    return 1


def _verb(verb: str, kind: str) -> list[str]:
    return ["was", verb, "by"] if kind == "passive" else [verb]
