"""Sort a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import AlgorithmTask, rewriting
from posenc.experiments.tasks.common.task import Defaults, TaskEntry, TaskSettings, times

__all__ = ["ENTRY"]


def _make(settings: TaskSettings) -> AlgorithmTask:
    return rewriting(
        settings,
        name="sorting",
        title="Sort a sequence longer than any in training",
        rewrite=sorted,
    )


ENTRY = TaskEntry(
    make=_make,
    summary="Sort a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="The answer does not depend on where symbols stand, so that NoPE does as well "
    "as any, and unsorted random positions are no handicap; what fails past the training length "
    "are sinusoids, at positions they were not trained at (Ruoss et al. 2023, bucket sort).",
    defaults=Defaults(
        encodings=("rope", "alibi", "t5", "sinusoidal", "sinusoidal@randomized"),
        references=("nope", "sinusoidal@unsorted"),
        train_length=16,
        test_lengths=times(1, 1.5, 2, 4, 8, 16),
        steps=1000,
        batch=64,
        learning_rate=5e-3,
    ),
    options={"symbols": 32, "distinct": False},
    length_unit="symbols",
)
