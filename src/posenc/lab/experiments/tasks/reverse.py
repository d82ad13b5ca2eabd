"""Reverse a sequence of symbols."""

from __future__ import annotations

from posenc.lab.experiments.tasks.common.algorithm import rewriting

ENTRY = rewriting(
    name="reverse",
    job="Reverse a sequence",
    rewrite=lambda symbols: symbols[::-1],
    expectation="Learned within the training length by all; past it T5's biases and NoPE keep "
    "most, ALiBi less, rotations and sinusoids little (Kazemnejad et al. 2023). Unsorted random "
    "positions, the control, must not reverse.",
)
