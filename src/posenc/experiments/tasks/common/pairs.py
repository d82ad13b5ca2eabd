"""Tasks that read one sequence and write another: an encoder–decoder and its measurements.

The data is pairs. Those no longer than the training length are trained on, but for some that are
held out by the hash of their name; longer ones are never trained on and are all there to be
tested. What the model writes by greedy decoding is scored, not what it would predict after the
right beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, DataError
from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.recipe import Recipe, describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.sequences import BEGIN, END, drawn, padded, pair_loss, read_source
from posenc.experiments.tasks.common.task import (
    Probe,
    TaskSettings,
    fingerprint,
    generator,
    probed,
    seen,
)
from posenc.models import Transformer, TransformerConfig, generate
from posenc.training.memory_estimate import require_step, stack_bytes

__all__ = ["Pair", "PairTask", "PairWork", "Split", "plain_recipe"]

MOST, FEWEST = 512, 16
"""Pairs tested at a length, and how many there must be for a number to mean something."""

POOLED = 8
"""A batch is cut from so many drawn at once and sorted by length, so that little is padding."""

ROWS = 128
"""Sources decoded at a time."""


@dataclass(frozen=True)
class Pair:
    """Something to read and what to write.

    Args:
        name: tells it from others; what is held out follows from it alone.
        source, target: symbols, without begin and end.
        answers: what counts as right, for whoever scores it.
    """

    name: str
    source: Sequence[int]
    target: Sequence[int]
    answers: Sequence[str] = ()

    @property
    def length(self) -> int:
        """Symbols of the longer side."""
        return max(len(self.source), len(self.target))


@dataclass(frozen=True)
class Split:
    """Pairs to train on, and to test on at each length.

    Args:
        train: of the training length at most.
        tests: length to pairs, ascending; the first is the training length.
    """

    train: Sequence[Pair]
    tests: Mapping[int, Sequence[Pair]]

    @classmethod
    def of(cls, pairs: Sequence[Pair], lengths: Sequence[int], *, held_out: float) -> Split:
        """The split by the hashes of the pairs' names.

        At each length but the first are tested those that are longer than the length before.

        Args:
            pairs: all of them; those of one name fall into one part.
            lengths: ascending, the training length first.
            held_out: share of the short ones that is not trained on.

        Raises:
            DataError: when there is nothing to train on, or to test on at the training length.
        """
        named = ((drawn(pair.name), pair.name, index) for index, pair in enumerate(pairs))
        ranked = [(place, pairs[index].length, pairs[index]) for place, _, index in sorted(named)]
        short = [(place, pair) for place, size, pair in ranked if size <= lengths[0]]
        train = [pair for place, pair in short if place >= held_out]
        tests = {lengths[0]: [pair for place, pair in short if place < held_out][:MOST]}
        for before, length in pairwise(lengths):
            tests[length] = [pair for _, size, pair in ranked if before < size <= length][:MOST]
        if len(train) < FEWEST or len(tests[lengths[0]]) < FEWEST:
            raise DataError(
                "text",
                expected=f"at least {FEWEST} examples of at most {lengths[0]} symbols to train on, "
                f"and {FEWEST} held out",
                got=f"{len(train)} and {len(tests[lengths[0]])}",
                remedy="Give more text, or a longer train_length.",
            )
        return cls(train, tests)


@dataclass(frozen=True, kw_only=True)
class PairWork:
    """Data, vocabularies and metrics of a task of pairs.

    Args:
        title: what is done, as the title of a report.
        data: what it is done on, in a phrase.
        corpus: the same for the record.
        split: the pairs.
        source_vocabulary, target_vocabulary: numbers of tokens, begin and end included.
        shared: both sides have the same tokens.
        metrics: what ``score`` gives, in its order.
        score: the metrics' values, from what was written and the pairs.
        cross: encoding of the attention from target to source.
        dropout: probability of dropping a feature in training.
    """

    title: str
    data: str
    corpus: Corpus
    split: Split
    source_vocabulary: int
    target_vocabulary: int
    shared: bool = False
    metrics: tuple[Metric, ...]
    score: Callable[[Sequence[list[int]], Sequence[Pair]], Sequence[float]]
    cross: str = "nope"
    dropout: float = 0.0


class PairTask:
    """An encoder–decoder trained on short pairs and tested on longer ones, decoding greedily.

    Args:
        settings: of the comparison.
        work: what it learns.
    """

    training_unit = 1.0

    def __init__(self, settings: TaskSettings, work: PairWork) -> None:
        self._settings, self._work = settings, work
        self.title, self.data, self.corpus = work.title, work.data, work.corpus
        self.lengths = settings.lengths
        self._width = self.lengths[0] + 1  # with begin or end
        self.tokens_per_step = 2 * settings.batch * self._width
        self.fingerprint = fingerprint(
            work.corpus.sha256,
            tuple(sorted(settings.options.items())),
            settings.train_length,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
        )
        headline = next(metric for metric in work.metrics if metric.headline)
        self.metrics = (*work.metrics, _training_loss(), seen(headline))
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, self._width),
        )
        keys = tuple(metric.key for metric in work.metrics)
        self._probes = [
            Probe(
                metrics=keys,
                x=length,
                run=lambda model, length=length, pairs=pairs: self._score(  # type: ignore[misc]
                    model, pairs, length
                ),
                needs=lambda model, length=length: self._needs(model, length),  # type: ignore[misc]
            )
            for length, pairs in work.split.tests.items()
            if len(pairs) >= FEWEST
        ]
        tested = len(work.split.tests[self.lengths[0]])
        place = work.metrics.index(headline)
        self._probes.append(
            Probe(
                metrics=("seen",),
                x=self.lengths[0],
                run=lambda model: self._score(model, work.split.train[:tested], self.lengths[0])[
                    place : place + 1
                ],
            )
        )

    def build(self, encoding: str) -> Transformer:
        """A ``Transformer``, the encoding in encoder and decoder.

        A learned table, if it has one, ends where training ends.
        """
        recipe = plain_recipe(encoding)
        settings, work = self._settings, self._work
        cross = Recipe.parse(work.cross)
        options = fitted_options(recipe, self._width)
        return Transformer(
            TransformerConfig(
                source_vocabulary=work.source_vocabulary,
                target_vocabulary=work.target_vocabulary,
                dim=settings.width,
                heads=settings.heads,
                encoder_layers=settings.layers,
                decoder_layers=settings.layers,
                encoder_encoding=recipe.encoding,
                decoder_encoding=recipe.encoding,
                cross_encoding=cross.encoding,
                encoder_options=options,
                decoder_options=options,
                cross_options=fitted_options(cross, self._width),
                shared=work.shared,
                dropout=work.dropout,
                max_length=self._width,
            )
        )

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``source``, ``target`` ``[batch, L]`` and ``sizes`` ``[batch, 2]``, of similar lengths.

        Sources end with the end; targets begin with the begin and end with the end.
        """
        train, rows = self._work.split.train, self._settings.batch
        source = generator(seed, step)
        chosen = torch.randint(len(train), (POOLED * rows,), generator=source)
        pool = sorted((train[index] for index in chosen), key=lambda pair: pair.length)
        begin = rows * int(torch.randint(POOLED, (), generator=source))
        pairs = pool[begin : begin + rows]
        return padded([(pair.source, pair.target) for pair in pairs])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the targets' tokens, in nats."""
        return pair_loss(cast(Transformer, model), batch)

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows = self._settings.batch
        needed = self._bytes(model, rows, self._width, training=True)
        require_step(needed, available, rows=rows, length=self._width)

    def count(self, encoding: str) -> int:
        """One measurement a length that has enough pairs, and one of pairs trained on."""
        return len(self._probes) + bool(self._untestable())

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """All metrics at every length."""
        yield from probed(self._probes, model, subject=encoding, seed=seed, available=available)
        lacking = [
            Refusal(
                subject=encoding,
                metric=metric.key,
                x=length,
                reason=f"the data has only {count} examples of this length",
            )
            for length, count in self._untestable().items()
            for metric in self._work.metrics
        ]
        if lacking:
            yield list(lacking)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model; ``Transformer.load`` reads it."""
        cast(Transformer, model).save(folder)

    def _untestable(self) -> dict[int, int]:
        tests = self._work.split.tests
        return {length: len(pairs) for length, pairs in tests.items() if len(pairs) < FEWEST}

    def _score(self, model: nn.Module, tested: Sequence[Pair], length: int) -> Sequence[float]:
        pairs = sorted(tested, key=lambda pair: len(pair.source))
        written: list[list[int]] = []
        for begin in range(0, len(pairs), ROWS):
            sources = [pair.source for pair in pairs[begin : begin + ROWS]]
            written += _written(cast(Transformer, model), sources, most=length + 1)
        return self._work.score(written, pairs)

    def _needs(self, model: nn.Module, length: int) -> int:
        return self._bytes(model, ROWS, length + 1, training=False)

    def _bytes(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        # A decoder's block has two attentions; its feed-forward layer is counted twice for that.
        return stack_bytes(
            cast(Transformer, model).config,
            layers=3 * self._settings.layers,
            vocabulary=self._work.target_vocabulary,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            rows=rows,
            length=length,
            training=training,
        )


def plain_recipe(encoding: str) -> Recipe:
    """The recipe called ``encoding``, of tokens at 0, 1, 2, …

    Raises:
        ArgumentError: when it has them elsewhere.
    """
    recipe = Recipe.parse(encoding)
    if recipe.positions != "plain":
        raise ArgumentError(
            "encoding",
            expected="positions 0, 1, 2, … of the tokens",
            got=encoding,
            remedy="See posenc tasks for those that draw positions: copy, for example.",
        )
    return recipe


@torch.inference_mode()
def _written(model: Transformer, sources: Sequence[Sequence[int]], *, most: int) -> list[list[int]]:
    """Output of greedy decoding for each source, without begin and end."""
    given = read_source(model, sources)
    begin = torch.full((len(sources), 1), BEGIN, device=model.source_embedding.weight.device)
    done = generate(given, begin, max_new_tokens=most, stop_token=END)[:, 1:].tolist()
    return [row[: row.index(END)] if END in row else row for row in done]


def _training_loss() -> Metric:
    return Metric(
        key="training_loss",
        label="Training loss",
        unit="nats per token",
        axis="training step",
        lower_is_better=True,
        chance=None,
        description="Mean over the steps since the point before.",
        headline=False,
        log_x=False,
    )
