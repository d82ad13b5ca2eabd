"""Copy a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import DEFAULTS, rewriting
from posenc.experiments.tasks.common.task import TaskEntry

ENTRY = TaskEntry(
    make=lambda settings: rewriting(
        settings,
        name="copy",
        title="Copy a sequence longer than any in training",
        rewrite=lambda symbols: symbols,
    ),
    summary="Copy a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="Relative biases and NoPE carry over to somewhat longer sequences, T5's best "
    "of all; sinusoids and learned tables fail at once past the training length (Kazemnejad et "
    "al. 2023). Randomized positions carry over further (Ruoss et al. 2023). Unsorted ones, the "
    "control, must not copy.",
    defaults=DEFAULTS,
    options={"symbols": 64, "distinct": False},
    length_unit="symbols",
)
