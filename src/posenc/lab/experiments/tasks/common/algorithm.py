"""Algorithmic tasks: a decoder that learns a rule from random examples, at random positions too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError
from posenc.lab.experiments.recipe import Positions, Recipe, fitted_options
from posenc.lab.experiments.results import Corpus
from posenc.lab.experiments.tasks.common.task import (
    Defaults,
    Task,
    TaskEntry,
    TaskSettings,
    times,
    training_loss,
)
from posenc.lab.experiments.text_loss import rows_a_call
from posenc.lab.reporting.judge import Metric
from posenc.lab.training.machine import decoder_bytes
from posenc.lab.training.seeding import fingerprint, generator
from posenc.layout import Layout
from posenc.layout.transforms import randomized
from posenc.models import Decoder, DecoderConfig

SEPARATOR, END, SYMBOLS = 0, 1, 2
"""Tokens: the end of a question, the end of an answer, and the first of the symbols."""

IGNORED = -100
"""A target that is not scored (the default of ``cross_entropy``)."""

TESTED_TOKENS = 1 << 15
MOST, FEWEST = 256, 32
"""Examples tested at a length: as many as have ``TESTED_TOKENS``, within these bounds."""

LEARNED = 0.9
"""Share of tokens that shows that a rule was learned at the training length."""

DEFAULTS = Defaults(
    encodings=("rope", "alibi", "t5", "sinusoidal", "sinusoidal@randomized"),
    references=("nope", "sinusoidal@unsorted"),
    train_length=16,
    test_lengths=times(1, 1.5, 2, 4, 8, 16),
    steps=1000,
    batch=64,
    learning_rate=5e-3,
)
"""Settings of most algorithmic tasks."""


@dataclass(frozen=True)
class Example:
    """Input tokens, and a target after each; None where nothing is scored."""

    inputs: Sequence[int]
    targets: Sequence[int | None]


def answered(question: Sequence[int], answer: Sequence[int]) -> Example:
    """The question, a separator, and the scored answer with an end."""
    inputs = [*question, SEPARATOR, *answer]
    return Example(inputs, [*[None] * len(question), *answer, END])


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A rule to learn.

    Args:
        title: the job, as the title of a report.
        data: the data, in a phrase.
        definition: name of the rule; with the options it decides the examples.
        vocabulary: number of tokens.
        draw: a random example of a length.
        train: a random training example; by default one of ``shortest`` to ``train_length``.
        shortest: shortest length in training.
        width: tokens in the longest example of a length.
        trivial: share of tokens that ``trivial_rule`` gets right.
        trivial_rule: a predictor that sees no input.
        unit: what lengths count.
        scored: what is scored, in the plural.
    """

    title: str
    data: str
    definition: str
    vocabulary: int
    draw: Callable[[int, Random], Example]
    train: Callable[[Random], Example] | None = None
    shortest: int = 1
    width: Callable[[int], int]
    trivial: float
    trivial_rule: str = "a guess"
    unit: str
    scored: str = "tokens of the answers"


class AlgorithmTask(Task):
    """A decoder-only model trained on short examples of a rule and tested on longer ones.

    Args:
        settings: of the comparison.
        algorithm: the rule.
    """

    positions = get_args(Positions)

    def __init__(self, settings: TaskSettings, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._longest = max(algorithm.width(length) for length in settings.lengths)
        definition = fingerprint(algorithm.definition, tuple(sorted(settings.options.items())))
        super().__init__(
            settings,
            title=algorithm.title,
            corpus=Corpus(name=algorithm.data, sha256=definition, unit="examples"),
            metrics=_metrics(algorithm),
            decisive=(definition, settings.train_length, self._longest),
            example_length=algorithm.width(settings.train_length),
        )
        for length in self.lengths:
            tokens = algorithm.width(length)
            run = partial(self._score, length=length)
            keys = ("token_accuracy", "accuracy")
            self.add_probe(keys, length, run, rows=rows_a_call(tokens), length=tokens)

    def make_model(self, recipe: Recipe) -> RandomlyPlacedDecoder:
        """A ``Decoder``; a learned table ends where training ends."""
        max_length = self.example_length if recipe.positions == "plain" else self._longest
        arguments = self.model_arguments(recipe)
        arguments |= {"options": fitted_options(recipe, max_length), "max_length": max_length}
        config = DecoderConfig(vocabulary=self._algorithm.vocabulary, **arguments)
        return RandomlyPlacedDecoder(
            Decoder(config), positions=recipe.positions, max_length=max_length
        )

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs`` and ``targets`` ``[batch, L]``, padded on the right, and a ``draw``."""
        rule, source = self._algorithm, Random(repr((seed, step)))
        examples = [
            rule.draw(source.randint(rule.shortest, self.lengths[0]), source)
            if rule.train is None
            else rule.train(source)
            for _ in range(self.settings.batch)
        ]
        batch = _stacked(examples, self.example_length)
        return batch | {"draw": torch.tensor(source.getrandbits(31))}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of scored tokens, in nats."""
        logits = model(batch["inputs"], batch["draw"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch["targets"].flatten(), ignore_index=IGNORED)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Tokens that the loss averages over."""
        return int((batch["targets"] != IGNORED).sum())

    def saved_model(self, model: nn.Module) -> Decoder:
        """The decoder."""
        return cast(RandomlyPlacedDecoder, model).decoder

    def bytes_needed(self, model: nn.Module, rows: int, length: int, *, training: bool) -> int:
        """Memory that the decoder's backends need, in bytes."""
        return decoder_bytes(self.saved_model(model), rows, length, training=training)

    def _score(self, model: nn.Module, length: int) -> tuple[float, float]:
        device = next(model.parameters()).device
        tokens = self._algorithm.width(length)
        count = max(FEWEST, min(MOST, TESTED_TOKENS // tokens))
        source = Random(repr(("test", length)))
        examples = [self._algorithm.draw(length, source) for _ in range(count)]
        rows = rows_a_call(tokens)
        right: list[Tensor] = []
        scored: list[Tensor] = []
        for begin in range(0, count, rows):
            batch = _stacked(examples[begin : begin + rows], tokens)
            draw = torch.randint(2**31 - 1, (), generator=generator(length, begin))
            with torch.inference_mode():
                logits = model(batch["inputs"].to(device), draw.to(device))
            scored.append(batch["targets"] != IGNORED)
            right.append(logits.argmax(-1).cpu() == batch["targets"])
        all_scored, all_right = torch.cat(scored), torch.cat(right)
        all_correct = (all_right | ~all_scored).all(1)
        return float(all_right[all_scored].double().mean()), float(all_correct.double().mean())


def algorithm_entry(
    rule: Callable[[TaskSettings], Algorithm], *, defaults: Defaults = DEFAULTS, **listed: Any
) -> TaskEntry:
    """The entry of a task that learns a rule.

    Args:
        rule: from the settings; may raise ArgumentError.
        defaults, listed: see ``TaskEntry``.
    """
    return TaskEntry(
        make=lambda settings: AlgorithmTask(settings, rule(settings)), defaults=defaults, **listed
    )


def _metrics(rule: Algorithm) -> tuple[Metric, ...]:
    metric = partial(Metric, axis=f"length ({rule.unit})", lower_is_better=False)
    return (
        metric(
            key="token_accuracy",
            label=f"{rule.scored.capitalize()} right",
            unit=f"share of {rule.scored}",
            trivial=rule.trivial,
            trivial_rule=rule.trivial_rule,
            description=f"Share of {rule.scored} that are predicted right, each after the "
            f"right ones before it. The rule is {rule.trivial_rule}.",
            headline=True,
            learned=LEARNED,
        ),
        metric(
            key="accuracy",
            label="Whole examples right",
            unit="share of examples",
            description="Share of examples in which nothing is wrong: what greedy decoding "
            "would get right.",
        ),
        training_loss("nats per token"),
    )


def _stacked(examples: Sequence[Example], width: int) -> dict[str, Tensor]:
    """Examples as ``[B, width]`` tensors, padded on the right."""
    inputs = torch.full((len(examples), width), END)
    targets = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        inputs[row, : len(example.inputs)] = torch.tensor(example.inputs)
        scored = [IGNORED if token is None else token for token in example.targets]
        targets[row, : len(scored)] = torch.tensor(scored)
    return {"inputs": inputs, "targets": targets}


def rewriting(
    *,
    name: str,
    job: str,
    rewrite: Callable[[list[int]], Sequence[int]],
    expectation: str,
    symbols: int = 64,
) -> TaskEntry:
    """The entry of a task that answers random symbols by the same symbols in another order.

    Its options are ``symbols`` (how many there are) and ``distinct`` (whether a sequence has none
    twice).

    Args:
        name: of the task.
        job: what is done to a sequence ("Reverse a sequence").
        rewrite: the answer.
        expectation: see ``TaskEntry``.
        symbols: default of the option.
    """

    def rule(settings: TaskSettings) -> Algorithm:
        kinds: int = settings.options["symbols"]
        distinct: bool = settings.options["distinct"]
        least = settings.lengths[-1] if distinct else 2
        if kinds < least:
            raise ArgumentError(
                "symbols",
                expected=f"at least {least}" + (", the longest test" if distinct else ""),
                got=kinds,
                remedy="Raise it, or test shorter sequences.",
            )
        alphabet = range(SYMBOLS, SYMBOLS + kinds)

        def draw(length: int, random: Random) -> Example:
            drawn = (
                random.sample(alphabet, length) if distinct else random.choices(alphabet, k=length)
            )
            return answered(drawn, rewrite(drawn))

        return Algorithm(
            title=f"{job} longer than any in training",
            data=f"random sequences of {kinds} symbols, 1 to {settings.train_length} long in "
            "training",
            definition=name,
            vocabulary=SYMBOLS + kinds,
            draw=draw,
            width=lambda length: 2 * length + 1,
            trivial=1 / kinds,
            unit="symbols",
        )

    return algorithm_entry(
        rule,
        summary=f"{job} of symbols, longer than any in training",
        data="random symbols, generated",
        metric="share of tokens right; share of whole sequences right",
        expectation=expectation,
        options={"symbols": symbols, "distinct": False},
        length_unit="symbols",
    )


class RandomlyPlacedDecoder(nn.Module):
    """A decoder with tokens at 0, 1, 2, …, or at random positions in a range of ``max_length``."""

    def __init__(self, decoder: Decoder, *, positions: Positions, max_length: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.positions: Positions = positions
        self.max_length = max_length

    def forward(self, tokens: Int[Tensor, "B L"], draw: Int[Tensor, ""]) -> Float[Tensor, "B L V"]:
        """Logits after each token; ``draw`` seeds the positions."""
        layout = None
        if self.positions != "plain":
            drawn = random_layout(
                tokens.shape[1], self.positions, max_length=self.max_length, seed=int(draw)
            )
            layout = drawn.to(tokens.device)
        logits: Tensor = self.decoder(tokens, layout)
        return logits


def random_layout(length: int, positions: Positions, *, max_length: int, seed: int) -> Layout:
    """Layout of ``length`` tokens, at positions in a range of ``max_length`` (or ``length``)."""
    layout = Layout.sequence(length)
    if positions in ("plain", "index"):
        return layout
    source = generator(seed, length)
    layout = randomized(layout, max_length=max(max_length, length), generator=source)
    if positions == "randomized":
        return layout
    shuffled = torch.randperm(length, generator=source)
    return layout.with_positions(layout.positions[:, shuffled])
