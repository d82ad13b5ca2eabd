"""Copy a sequence of symbols."""

from __future__ import annotations

from posenc.lab.experiments.tasks.common.algorithm import rewriting

ENTRY = rewriting(
    name="copy",
    job="Copy a sequence",
    rewrite=lambda symbols: symbols,
    expectation="Relative biases and NoPE carry over to somewhat longer sequences, T5's best "
    "of all; sinusoids and learned tables fail at once past the training length (Kazemnejad et "
    "al. 2023). Randomized positions carry over further (Ruoss et al. 2023). Unsorted ones, the "
    "control, must not copy.",
)
