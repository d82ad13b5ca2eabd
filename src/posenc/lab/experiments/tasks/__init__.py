"""Tasks that tell encodings apart, one a file; helpers of several are in ``common``."""

from posenc.lab.experiments.tasks.common.task import Task, TaskEntry
from posenc.registration import Registry

__all__ = ["TASKS", "Task", "TaskEntry"]

TASKS: Registry[TaskEntry] = Registry(
    TaskEntry, "task", "posenc.lab.experiments.tasks", group="posenc.tasks"
)
"""Every task by name, sorted; those of other packages included."""
