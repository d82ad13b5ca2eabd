"""Jobs that tell encodings apart."""

from posenc.lab.tasks import language
from posenc.lab.tasks.language import LanguageModelling
from posenc.lab.tasks.task import Task, TaskEntry

__all__ = ["TASKS", "LanguageModelling", "Task", "TaskEntry"]

TASKS: dict[str, TaskEntry] = {
    "language": language.ENTRY,
}
"""Every task by name."""
