"""Algorithmic tasks: a decoder that learns a rule from examples drawn by it.

Each task is a rule: it draws an example of any length. The model is trained on short ones and
tested on longer ones. A whole answer counts as right if every token of it is; since each token is
predicted after the right ones before it, that is so exactly when greedy decoding gives the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.errors import ArgumentError
from posenc.experiments.fitting import fit_note, fitted_options
from posenc.experiments.placement import Placed
from posenc.experiments.recipe import Recipe, describe
from posenc.experiments.results import Corpus, Measurement, Metric, Refusal
from posenc.experiments.tasks.common.task import Probe, TaskSettings, fingerprint, generator, probed
from posenc.experiments.text_loss import rows_a_call
from posenc.models import Decoder, DecoderConfig
from posenc.training.memory_estimate import decoder_bytes, require_step

__all__ = [
    "END",
    "SEPARATOR",
    "SYMBOLS",
    "Algorithm",
    "AlgorithmTask",
    "Example",
    "answered",
    "rewriting",
]

SEPARATOR, END, SYMBOLS = 0, 1, 2
"""Tokens: what ends a question, what ends an answer, and the first of the symbols."""

IGNORED = -100
"""A target that is not scored (cross_entropy's own)."""

TESTED_TOKENS = 1 << 15
MOST, FEWEST = 256, 32
"""Examples tested at a length: as many as keep to the tokens, within bounds."""


@dataclass(frozen=True)
class Example:
    """Tokens to read, and what to predict after each.

    Args:
        inputs: tokens.
        targets: as many; None where nothing is asked.
    """

    inputs: Sequence[int]
    targets: Sequence[int | None]


def answered(question: Sequence[int], answer: Sequence[int]) -> Example:
    """The question, a separator, and the answer with an end, of which all is asked for."""
    inputs = [*question, SEPARATOR, *answer]
    return Example(inputs, [*[None] * len(question), *answer, END])


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A rule to learn.

    Args:
        title: what is done, as the title of a report.
        data: what it is done on, in a phrase.
        definition: whatever decides what is drawn, besides its random source.
        vocabulary: tokens there are.
        draw: an example of a length.
        train: an example to train on.
        width: tokens in the longest example of a length.
        chance: share of tokens that a guess gets right.
        unit: what lengths count.
        scored: what is scored, in the plural.
        learned: share of tokens that tells that the rule was learned at the training length.
    """

    title: str
    data: str
    definition: str
    vocabulary: int
    draw: Callable[[int, Random], Example]
    train: Callable[[Random], Example]
    width: Callable[[int], int]
    chance: float
    unit: str
    scored: str = "tokens of the answers"
    learned: float = 0.9


class AlgorithmTask:
    """A decoder-only model trained on short examples of a rule and tested on longer ones.

    Args:
        settings: of the comparison.
        algorithm: the rule.
    """

    training_unit = 1.0

    def __init__(self, settings: TaskSettings, algorithm: Algorithm) -> None:
        self._settings, self._algorithm = settings, algorithm
        self.title, self.data = algorithm.title, algorithm.data
        self.lengths = settings.lengths
        self._width = algorithm.width(self.lengths[0])
        self._reach = max(algorithm.width(length) for length in self.lengths)
        self.tokens_per_step = settings.batch * self._width
        definition = fingerprint(algorithm.definition, tuple(sorted(settings.options.items())))
        self.corpus = Corpus(
            name=algorithm.data,
            files=0,
            train_bytes=0,
            held_out_bytes=0,
            sha256=definition,
            unit="examples",
        )
        self.fingerprint = fingerprint(
            definition,
            settings.train_length,
            self._reach,
            settings.width,
            settings.layers,
            settings.heads,
            settings.batch,
        )
        self.metrics = self._metrics()
        self.subjects = describe(
            settings.variants,
            references=settings.references,
            note=lambda encoding: fit_note(encoding, self._width),
        )
        self._probes = [
            Probe(
                metrics=("token_accuracy", "accuracy"),
                x=length,
                run=lambda model, length=length: self._score(model, length),  # type: ignore[misc]
                needs=lambda model, length=length: self._needs(model, length),  # type: ignore[misc]
            )
            for length in self.lengths
        ]

    def build(self, encoding: str) -> Placed:
        """A ``Decoder``; a learned table, if it has one, ends where training ends."""
        recipe = Recipe.parse(encoding)
        settings = self._settings
        drawn = recipe.positions != "plain"
        reach = self._reach if drawn else self._width
        config = DecoderConfig(
            vocabulary=self._algorithm.vocabulary,
            dim=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            encoding=recipe.encoding,
            options=fitted_options(recipe, reach),
            max_length=reach,
        )
        return Placed(Decoder(config), positions=recipe.positions, reach=reach)

    def batch(self, seed: int, step: int) -> dict[str, Tensor]:
        """``inputs`` and ``targets`` ``[batch, L]``, padded on the right, and a ``draw``."""
        source = Random(repr((seed, step)))
        examples = [self._algorithm.train(source) for _ in range(self._settings.batch)]
        return _stacked(examples, self._width) | {"draw": torch.tensor(source.getrandbits(31))}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of what is asked, in nats."""
        logits = model(batch["inputs"], batch["draw"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), batch["targets"].flatten(), ignore_index=IGNORED)

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse a training step that is estimated not to fit into ``available`` bytes."""
        rows = self._settings.batch
        needed = decoder_bytes(cast(Placed, model).decoder, rows, self._width, training=True)
        require_step(needed, available, rows=rows, length=self._width)

    def count(self, encoding: str) -> int:
        """One measurement a length."""
        return len(self._probes)

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """Both accuracies at every length."""
        return probed(self._probes, model, subject=encoding, seed=seed, available=available)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the decoder; ``Decoder.load`` reads it."""
        cast(Placed, model).decoder.save(folder)

    def _score(self, model: nn.Module, length: int) -> tuple[float, float]:
        device = next(model.parameters()).device
        tokens = self._algorithm.width(length)
        count = max(FEWEST, min(MOST, TESTED_TOKENS // tokens))
        source = Random(repr(("test", length)))
        examples = [self._algorithm.draw(length, source) for _ in range(count)]
        rows = rows_a_call(tokens)
        right: list[Tensor] = []
        asked: list[Tensor] = []
        for begin in range(0, count, rows):
            batch = _stacked(examples[begin : begin + rows], tokens)
            draw = torch.randint(2**31 - 1, (), generator=generator(length, begin))
            with torch.inference_mode():
                logits = model(batch["inputs"].to(device), draw.to(device))
            asked.append(batch["targets"] != IGNORED)
            right.append(logits.argmax(-1).cpu() == batch["targets"])
        scored, hits = torch.cat(asked), torch.cat(right)
        whole = (hits | ~scored).all(1)
        return float(hits[scored].double().mean()), float(whole.double().mean())

    def _needs(self, model: nn.Module, length: int) -> int:
        tokens = self._algorithm.width(length)
        decoder = cast(Placed, model).decoder
        return decoder_bytes(decoder, rows_a_call(tokens), tokens, training=False)

    def _metrics(self) -> tuple[Metric, ...]:
        rule, lengths = self._algorithm, self.lengths
        axis = f"length ({rule.unit})"
        return (
            Metric(
                key="token_accuracy",
                label=f"{rule.scored.capitalize()} right",
                unit=f"share of {rule.scored}",
                axis=axis,
                lower_is_better=False,
                chance=rule.chance,
                description=f"Share of {rule.scored} that are predicted right, each after the "
                "right ones before it. The rule is a guess.",
                headline=True,
                log_x=lengths[-1] > 2 * lengths[0],
                learned=rule.learned,
            ),
            Metric(
                key="accuracy",
                label="Whole examples right",
                unit="share of examples",
                axis=axis,
                lower_is_better=False,
                chance=None,
                description="Share of examples in which nothing is wrong: what greedy decoding "
                "would get right.",
                headline=False,
                log_x=lengths[-1] > 2 * lengths[0],
            ),
            Metric(
                key="training_loss",
                label="Training loss",
                unit="nats per token",
                axis="training step",
                lower_is_better=True,
                chance=None,
                description="Mean over the steps since the point before.",
                headline=False,
                log_x=False,
            ),
        )


def _stacked(examples: Sequence[Example], width: int) -> dict[str, Tensor]:
    """Examples as ``[B, width]`` tensors, padded on the right by what is not asked."""
    inputs = [[*one.inputs, *[END] * (width - len(one.inputs))] for one in examples]
    targets = [
        [
            *(IGNORED if token is None else token for token in one.targets),
            *[IGNORED] * (width - len(one.targets)),
        ]
        for one in examples
    ]
    return {"inputs": torch.tensor(inputs), "targets": torch.tensor(targets)}


def rewriting(
    settings: TaskSettings, *, name: str, title: str, rewrite: Callable[[list[int]], Sequence[int]]
) -> AlgorithmTask:
    """The task of answering random symbols by the same symbols in another order.

    Args:
        settings: of the comparison; its options are ``symbols`` (how many there are) and
            ``distinct`` (whether a sequence has none twice).
        name, title: of the task.
        rewrite: the answer.

    Raises:
        ArgumentError: when there are too few symbols.
    """
    kinds: int = settings.options["symbols"]
    distinct: bool = settings.options["distinct"]
    longest = settings.train_length
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
        symbols = (
            random.sample(alphabet, length) if distinct else random.choices(alphabet, k=length)
        )
        return answered(symbols, rewrite(symbols))

    return AlgorithmTask(
        settings,
        Algorithm(
            title=title,
            data=f"random sequences of {kinds} symbols, 1 to {longest} long in training",
            definition=name,
            vocabulary=SYMBOLS + kinds,
            draw=draw,
            train=lambda random: draw(random.randint(1, longest), random),
            width=lambda length: 2 * length + 1,
            chance=1 / kinds,
            unit="symbols",
        ),
    )
