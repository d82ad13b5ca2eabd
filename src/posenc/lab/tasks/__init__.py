"""Jobs that tell encodings apart."""

from collections.abc import Callable

from posenc.lab.settings import Settings
from posenc.lab.tasks.language import LanguageModelling
from posenc.lab.tasks.task import Task

__all__ = ["TASKS", "LanguageModelling", "Task"]

TASKS: dict[str, Callable[[Settings], Task]] = {"language": LanguageModelling}
"""Every task by name."""
