"""Training loop, its checkpoints, and the machine it runs on.

``fit`` trains any module on an ``Objective`` (batches and a loss) by a ``TrainingPlan``; ``train``
builds the module first, from a ``TrainingTask`` and the name of an encoding. Given a mesh, several
ranks train one model, by DDP or FSDP2.

Names are imported at their first use: Fabric and PyTorch's distributed checkpoints take seconds,
and much that needs a seed or the machine's memory trains nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.lab.training.checkpoint import TrainingPlan
    from posenc.lab.training.loop import Objective, Trained, TrainingTask, Watch, fit, train
    from posenc.lab.training.ranks import full_weights
    from posenc.lab.training.stopping import interruptible

__all__ = [
    "Objective",
    "Trained",
    "TrainingPlan",
    "TrainingTask",
    "Watch",
    "fit",
    "full_weights",
    "interruptible",
    "train",
]

_MODULES = {
    "TrainingPlan": "checkpoint",
    "interruptible": "stopping",
    "full_weights": "ranks",
    **dict.fromkeys(("Objective", "Trained", "TrainingTask", "Watch", "fit", "train"), "loop"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"posenc.lab.training.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
