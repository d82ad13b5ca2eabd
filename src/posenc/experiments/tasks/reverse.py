"""Reverse a sequence of symbols."""

from __future__ import annotations

from posenc.experiments.tasks.common.algorithm import DEFAULTS, rewriting
from posenc.experiments.tasks.common.task import TaskEntry

ENTRY = TaskEntry(
    make=lambda settings: rewriting(
        settings,
        name="reverse",
        title="Reverse a sequence longer than any in training",
        rewrite=lambda symbols: symbols[::-1],
    ),
    summary="Reverse a sequence of symbols, longer than any in training",
    data="random symbols, generated",
    metric="share of tokens right; share of whole sequences right",
    expectation="Learned within the training length by all; past it T5's biases and NoPE keep "
    "most, ALiBi less, rotations and sinusoids little (Kazemnejad et al. 2023). Unsorted random "
    "positions, the control, must not reverse.",
    defaults=DEFAULTS,
    options={"symbols": 64, "distinct": False},
    length_unit="symbols",
)
