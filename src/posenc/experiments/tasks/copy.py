"""Copy a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import AlgorithmTask, rewriting
from posenc.experiments.tasks.common.task import Defaults, TaskEntry, TaskSettings, times

__all__ = ["ENTRY"]


def _make(settings: TaskSettings) -> AlgorithmTask:
    return rewriting(
        settings,
        name="copy",
        title="Copy a sequence longer than any in training",
        rewrite=lambda symbols: symbols,
    )


ENTRY = TaskEntry(
    make=_make,
    summary="Copy a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="Relative biases and NoPE carry over to somewhat longer sequences, T5's best "
    "of all; sinusoids and learned tables fail at once past the training length (Kazemnejad et "
    "al. 2023). Randomized positions carry over further (Ruoss et al. 2023). Unsorted ones, the "
    "control, must not copy.",
    defaults=Defaults(
        encodings=("rope", "alibi", "t5", "sinusoidal", "sinusoidal@randomized"),
        references=("nope", "sinusoidal@unsorted"),
        train_length=16,
        test_lengths=times(1, 1.5, 2, 4, 8, 16),
        steps=1000,
        batch=64,
        learning_rate=5e-3,
    ),
    options={"symbols": 64, "distinct": False},
    length_unit="symbols",
)
