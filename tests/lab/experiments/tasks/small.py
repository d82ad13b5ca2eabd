"""Tasks with tiny models, and what they measure."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from posenc.lab.experiments.results import Measurement
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import TASKS, Task
from posenc.lab.training.loop import seeded_model

NATURAL = ("masked", "phonemes", "temperature", "translation", "word_order")
"""Tasks on natural data, and on sentences of a grammar."""


def write_pairs(folder: Path, count: int = 300) -> Path:
    """Letters, and the same in capitals from the end."""
    source = Random(4)
    lines = []
    for _ in range(count):
        words = ["".join(source.choices("abc", k=2)) for _ in range(source.randint(1, 6))]
        lines.append(" ".join(words) + "\t" + " ".join(reversed(words)).upper() + "\n")
    path = folder / "pairs.tsv"
    path.write_text("".join(lines))
    return path


def settings_of(name: str, folder: Path, **changes: Any) -> ComparisonSettings:
    given: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "batch": 8}
    if TASKS[name].reads_text and name != "word_order" and "text" not in changes:
        given["text"] = write_pairs(folder)
    if name == "translation":
        given["options"] = {"vocabulary": 30}
    return ComparisonSettings(out=folder / "out", task=name, **{**given, **changes})


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The task, of one layer with 16 channels."""
    settings = settings_of(name, folder, **changes)
    return settings.entry.make(settings)


def frozen(task: Task, encoding: str, seed: int = 0) -> Any:
    return seeded_model(task, encoding, seed).eval().requires_grad_(requires_grad=False)


def measured(task: Task, encoding: str, model: nn.Module | None = None) -> dict[Any, float | str]:
    """Values, or reasons why there are none, by metric and length; of a variant by its name too."""
    found: dict[Any, float | str] = {}
    pieces = list(task.measure(model or frozen(task, encoding), encoding, 0, available=None))
    assert len(pieces) == task.count(encoding)
    for item in (item for piece in pieces for item in piece):
        value = item.value if isinstance(item, Measurement) else item.reason
        of = () if item.subject == encoding else (item.subject,)
        found[(*of, item.metric, item.x)] = value
    return found
