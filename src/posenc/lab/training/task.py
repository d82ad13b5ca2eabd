"""Interfaces between the training loop and the code that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class Objective(Protocol):
    """Batches and loss of a training.

    All random draws come from generators seeded by the arguments, so that a run can be repeated,
    and resumed, to the bit. If the loss is a mean over other things than rows, a method
    ``weight(batch)`` returns their number, by which the losses of parts of a batch are averaged.
    """

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides a training step besides encoding, seed and step."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch."""

    def batch(self, seed: int, step: int) -> Mapping[str, Any]:
        """Tensors and layouts of a training step, a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The scalar to minimise."""


class TrainingTask(Objective, Protocol):
    """An objective with a model for every encoding."""

    def build(self, encoding: str) -> nn.Module:
        """A new model with ``encoding``, its weights drawn from torch's global generator.

        Raises:
            ArgumentError: when the encoding does not suit this task.
        """
