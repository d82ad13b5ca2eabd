"""Training loop, its checkpoints, and the machine it runs on.

``fit`` trains any module on an ``Objective`` (batches and a loss) by a ``TrainingPlan``; ``train``
builds the module first, from a ``TrainingTask`` and the name of an encoding. Given a mesh, several
ranks train one model, by DDP or FSDP2.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posenc.training.interrupt import interruptible
from posenc.training.task import Objective, TrainingTask

if TYPE_CHECKING:
    from posenc.training.checkpoint import TrainingPlan
    from posenc.training.loop import Trained, Watch, fit, train
    from posenc.training.ranks import full_weights

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

_LAZY = dict.fromkeys(("Trained", "Watch", "fit", "train"), "loop")
_LAZY |= {"TrainingPlan": "checkpoint", "full_weights": "ranks"}
"""What is imported at its first use: Lightning Fabric and FSDP take seconds, and programs that
train nothing use the other modules."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
