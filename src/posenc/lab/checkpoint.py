"""The whole state of a training, in one file that is never half written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posenc.errors import CheckpointError
from posenc.storage import load_tensors, save_tensors

__all__ = ["Checkpoint", "Plan"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one run is trained.

    Args:
        encoding, seed: which run.
        steps: optimiser steps in all.
        rate: peak learning rate.
        device: as ``torch.device`` reads it.
        precision: as Lightning Fabric reads it.
        folder: where its checkpoint is kept; it must exist.
    """

    encoding: str
    seed: int
    steps: int
    rate: float
    device: str = "cpu"
    precision: str = "32-true"
    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's file."""
        return self.folder / "checkpoint.safetensors"


class Checkpoint:
    """State of a training: weights, optimiser, generators, losses, and how far it came.

    Args:
        model, optimizer: whose tensors are saved, and restored in place.
        plan: what is trained.
        fingerprint: of the task; a checkpoint with another one is refused.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, fingerprint: str
    ) -> None:
        self.step = 0
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self.losses = torch.zeros(plan.steps, device=plan.device)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        described = {**asdict(plan), "fingerprint": fingerprint}
        self._identity = {k: v for k, v in described.items() if k != "folder"}

    def diverged(self) -> int | None:
        """The first step whose loss is no number, if there is one."""
        bad = (~torch.isfinite(self.losses[: self.step])).nonzero()
        return int(bad[0, 0]) if len(bad) else None

    def save(self) -> None:
        """Write the state to ``plan.checkpoint``.

        Raises:
            OutputError: when it cannot be written; the one before is untouched.
        """
        tensors = {f"model.{name}": x for name, x in self._weights().items()}
        for name, parameter in self._model.named_parameters():
            for key, x in self._optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = x
        tensors["losses"] = self.losses
        tensors["generator"] = torch.get_rng_state()
        if self.losses.is_cuda:
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.losses.device)
        meta = {
            "identity": self._identity,
            "step": self.step,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }
        save_tensors(self._plan.checkpoint, tensors, meta)

    def restore(self) -> None:
        """Take the state from ``plan.checkpoint``, if there is one.

        Raises:
            CheckpointError: when it is damaged, or of another run.
        """
        path = self._plan.checkpoint
        if not path.exists():
            return
        tensors, meta = load_tensors(path)
        if meta.get("identity") != self._identity:
            raise CheckpointError(
                str(path),
                expected=f"the state of {self._identity}",
                got=f"that of {meta.get('identity')}",
                remedy="Use the settings it was made with, or another folder.",
            )
        try:
            self._take(tensors)
            self.step, self.seconds = meta["step"], meta["seconds"]
            self.peak_memory_bytes = meta["peak_memory_bytes"]
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                str(path),
                expected="the tensors of this model",
                got=f"others ({error})",
                remedy="It comes from another version of posenc: delete it to train anew.",
            ) from error

    @torch.no_grad()
    def _take(self, tensors: dict[str, Tensor]) -> None:
        for name, x in self._weights().items():
            x.copy_(tensors[f"model.{name}"])
        for name, parameter in self._model.named_parameters():
            prefix = f"optimizer.{name}."
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix): x.to(parameter.device)
                for key, x in tensors.items()
                if key.startswith(prefix)
            }
        self.losses.copy_(tensors["losses"])
        torch.set_rng_state(tensors["generator"])
        if self.losses.is_cuda:
            torch.cuda.set_rng_state(tensors["generator.cuda"], self.losses.device)

    def _weights(self) -> dict[str, Tensor]:
        """Parameters and buffers, each once though layers may share it."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
