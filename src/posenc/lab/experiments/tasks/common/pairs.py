"""Tasks that read one sequence and write another: an encoder–decoder and its measurements.

The data is pairs. Those no longer than the training length are trained on, except for some that are
held out by the hash of their name; longer ones are only tested. The output of greedy decoding is
scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from posenc.lab.experiments.recipe import Recipe, fitted_options
from posenc.lab.experiments.results import Corpus, Metric
from posenc.lab.experiments.sequences import (
    BEGIN,
    END,
    FEWEST,
    Split,
    padded,
    pair_loss,
    read_source,
)
from posenc.lab.experiments.tasks.common.task import Task, TaskSettings, seen, training_loss
from posenc.lab.training.seeding import generator
from posenc.models import Transformer, TransformerConfig, generate

POOLED = 8
"""A batch is cut from so many drawn at once and sorted by length, so that little is padding."""

ROWS = 128
"""Sources decoded at a time."""


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
