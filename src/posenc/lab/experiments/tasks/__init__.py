"""Tasks that tell encodings apart; helpers of several are in ``common``."""

from posenc.lab.experiments.tasks.common.task import Task, TaskEntry
from posenc.registration import Registry

__all__ = ["TASKS", "Task", "TaskEntry"]

SEVERAL = {
    "pairs": ("phonemes", "translation"),
    "symbols": ("addition", "copy", "dyck", "parity", "recall", "reverse", "sorting"),
}
"""Tasks by the file that holds several; a function of its name makes each."""

TASKS: Registry[TaskEntry] = Registry(
    TaskEntry, "task", "posenc.lab.experiments.tasks", group="posenc.tasks"
)
"""Every task by name, sorted; those of other packages included."""
