"""Reverse a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import AlgorithmTask, rewriting
from posenc.experiments.tasks.common.task import Defaults, TaskEntry, TaskSettings, times

__all__ = ["ENTRY"]


def _make(settings: TaskSettings) -> AlgorithmTask:
    return rewriting(
        settings,
        name="reverse",
        title="Reverse a sequence longer than any in training",
        rewrite=lambda symbols: symbols[::-1],
    )


ENTRY = TaskEntry(
    make=_make,
    summary="Reverse a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="Learned within the training length by all; past it T5's biases and NoPE keep "
    "most, ALiBi less, rotations and sinusoids little (Kazemnejad et al. 2023). Unsorted random "
    "positions, the control, must not reverse.",
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
