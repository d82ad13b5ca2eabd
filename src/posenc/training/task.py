"""Interface between the training loop and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

__all__ = ["TrainingTask"]


class TrainingTask(Protocol):
    """A seeded model, its batches and its loss.

    All that is drawn at random comes from generators seeded by the arguments, so that a run can
    be repeated, and resumed, to the bit.
    """

    fingerprint: str
    """Changes with whatever decides a training step besides encoding, seed and step."""

    tokens_per_step: int
    """Tokens in a batch."""

    def build(self, encoding: str) -> nn.Module:
        """A new model with ``encoding``, its weights drawn from torch's global generator.

        Raises:
            ArgumentError: when the encoding does not suit this task.
        """

    def batch(self, seed: int, step: int) -> Mapping[str, Tensor]:
        """The data of a training step, a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The scalar to minimise."""
