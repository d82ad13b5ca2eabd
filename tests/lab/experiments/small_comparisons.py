"""A comparison of two encodings on a small text, and a log of its events."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posenc.lab.experiments.progress import Event
from posenc.lab.experiments.settings import ComparisonSettings


def write_text(path: Path) -> Path:
    letters = torch.randint(97, 123, (6000,), generator=torch.Generator().manual_seed(7))
    path.write_bytes(bytes(letters.tolist()))
    return path


def small(folder: Path, **changes: object) -> ComparisonSettings:
    """Two encodings, one seed, twelve steps."""
    names = {"encodings": ("rope", "learned"), "references": ("rope|window",), "seeds": (0,)}
    lengths = {"train_length": 16, "test_lengths": (32,), "steps": 12}
    sizes = {"width": 16, "layers": 1, "heads": 2, "batch": 4}
    files = {"out": folder / "out", "text": write_text(folder / "text.txt")}
    return ComparisonSettings(**files | names | lengths | sizes | changes)


class Log:
    """Keeps the events, and does something at the first of a kind."""

    def __init__(
        self, kind: type[Event] | None = None, act: Callable[[], None] = lambda: None
    ) -> None:
        self.kind, self.act = kind, act
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        first = self.kind is not None and not self.of(self.kind)
        self.events.append(event)
        if first and isinstance(event, self.kind or ()):
            self.act()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)
