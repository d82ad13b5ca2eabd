"""Training loop, its checkpoints, and the machine it runs on.

``fit`` trains any module on an ``Objective`` (batches and a loss) by a ``TrainingPlan``; ``train``
builds the module first, from a ``TrainingTask`` and the name of an encoding. Given a mesh, several
ranks train one model, by DDP or FSDP2.
"""

from posenc.training.checkpoint import TrainingPlan
from posenc.training.interrupt import interruptible
from posenc.training.loop import Trained, Watch, fit, train
from posenc.training.ranks import full_weights
from posenc.training.task import Objective, TrainingTask

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
