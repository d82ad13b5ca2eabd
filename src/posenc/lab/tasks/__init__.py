"""Jobs that tell encodings apart."""

from posenc.lab.tasks import (
    addition,
    copy,
    digits,
    dyck,
    language,
    parity,
    recall,
    reverse,
    scan,
    sorting,
)
from posenc.lab.tasks.language import LanguageModelling
from posenc.lab.tasks.task import Task, TaskEntry

__all__ = ["TASKS", "LanguageModelling", "Task", "TaskEntry"]

TASKS: dict[str, TaskEntry] = {
    "addition": addition.ENTRY,
    "copy": copy.ENTRY,
    "digits": digits.ENTRY,
    "dyck": dyck.ENTRY,
    "language": language.ENTRY,
    "parity": parity.ENTRY,
    "recall": recall.ENTRY,
    "reverse": reverse.ENTRY,
    "scan": scan.ENTRY,
    "sorting": sorting.ENTRY,
}
"""Every task by name."""
