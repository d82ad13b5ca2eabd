"""What a task is: data, a model, a loss and measurements, for any encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from posenc.lab.results import Corpus, Measurement, Metric, Refusal, Subject

__all__ = ["Task"]


class Task(Protocol):
    """A job that tells encodings apart.

    A task is made from ``Settings`` in every worker process; all it draws at random it draws from
    generators seeded by its arguments, so that every worker and every encoding sees the same.
    """

    title: str
    """What is done, as the title of the report."""

    data: str
    """What it is done on, in a phrase."""

    corpus: Corpus
    """The same for the record, with its hash."""

    fingerprint: str
    """Changes with whatever decides a step of training besides encoding, seed and step."""

    metrics: tuple[Metric, ...]
    """What is measured; one is the headline. ``"training_loss"`` is measured by the lab."""

    subjects: tuple[Subject, ...]
    """What is compared, each with the reason why it is there."""

    lengths: tuple[int, ...]
    """Where it is tested, ascending; the first is the training length."""

    tokens_per_step: int
    """Tokens in a batch."""

    training_unit: float
    """What the training loss is multiplied by to give the unit of ``"training_loss"``."""

    def build(self, encoding: str) -> nn.Module:
        """A new model with ``encoding``, its weights drawn from torch's global generator.

        Raises:
            ArgumentError: when the encoding cannot serve this task.
        """

    def batch(self, seed: int, step: int) -> Mapping[str, Tensor]:
        """The data of a training step, a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The scalar to minimise."""

    def require_memory(self, model: nn.Module, available: int) -> None:
        """Refuse to train what does not fit.

        Raises:
            ArgumentError: when a training step is estimated to take more than ``available`` bytes.
        """

    def count(self, encoding: str) -> int:
        """How many times ``measure`` yields."""

    def measure(
        self, model: nn.Module, encoding: str, seed: int, *, available: int | None
    ) -> Iterator[list[Measurement | Refusal]]:
        """Measure a trained model, and its variants, bit by bit.

        Args:
            model: as ``build`` made it, trained.
            encoding, seed: which run it is.
            available: bytes of memory there are; what needs more is refused before it is tried.
        """

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model, so that others can load it without the lab."""
