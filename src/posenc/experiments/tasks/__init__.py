"""Jobs that tell encodings apart."""

from posenc.experiments.tasks import (
    addition,
    copy,
    digits,
    dyck,
    language,
    masked,
    parity,
    phonemes,
    recall,
    reverse,
    scan,
    sorting,
    temperature,
    translation,
    word_order,
)
from posenc.experiments.tasks.language import LanguageModelling
from posenc.experiments.tasks.task import Task, TaskEntry

__all__ = ["TASKS", "LanguageModelling", "Task", "TaskEntry"]

TASKS: dict[str, TaskEntry] = {
    "addition": addition.ENTRY,
    "copy": copy.ENTRY,
    "digits": digits.ENTRY,
    "dyck": dyck.ENTRY,
    "language": language.ENTRY,
    "masked": masked.ENTRY,
    "parity": parity.ENTRY,
    "phonemes": phonemes.ENTRY,
    "recall": recall.ENTRY,
    "reverse": reverse.ENTRY,
    "scan": scan.ENTRY,
    "sorting": sorting.ENTRY,
    "temperature": temperature.ENTRY,
    "translation": translation.ENTRY,
    "word_order": word_order.ENTRY,
}
"""Every task by name."""
