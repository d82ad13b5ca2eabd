"""Progress of a study: reported as it goes, and kept in a file so that a stopped one continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from posenc.errors import CheckpointError, Interrupted
from posenc.evaluation.results import Findings, Reading
from posenc.storage import make_folder, read_json, write_json
from posenc.training.seeding import fingerprint

__all__ = ["MeasuredFile", "Progress", "kept", "silent"]

Progress = Callable[[str, int, int], None]
"""Called with the current stage, how many models are done, and how many there are."""


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def kept(state: Path, command: str = "") -> Iterator[None]:
    """Say of an interruption where the work so far is kept, and how to go on."""
    try:
        yield
    except Interrupted as error:
        again = command or "call it again with the same arguments."
        error.remedy = f"What was done is kept in {state}. To go on: {again}"
        raise


class MeasuredFile:
    """The readings of a study's candidates, in a JSON file.

    Args:
        path: of the file; None keeps nothing.
        model: before it is extended.
        conditions: all else that readings depend on. Readings under others are measured again.

    Raises:
        CheckpointError: when the file is damaged.
    """

    def __init__(self, path: Path | None, model: nn.Module, *conditions: object) -> None:
        self.path = path
        self._readings: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        self._conditions = fingerprint(sums, *conditions)
        if not path.exists():
            return
        plain = read_json(path, remedy="Delete it, and all is measured again.")
        if isinstance(plain, dict) and plain.get("conditions") == self._conditions:
            self._readings = dict(plain.get("readings") or {})

    def get(self, key: str) -> dict[str, Any] | None:
        """The measured fields of a candidate's ``Findings``; None: it has not been measured.

        Raises:
            CheckpointError: when the file is damaged.
        """
        plain = self._readings.get(key)
        if plain is None:
            return None
        try:
            readings = {name: Reading.from_json(plain[name]) for name in ("untuned", "tuned")}
            return {**readings, "failed": str(plain["failed"])}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(
                str(self.path),
                expected="the readings of a study",
                got=repr(error),
                remedy="Delete it, and all is measured again.",
            ) from error

    def add(self, findings: Findings) -> None:
        """Keep what has been measured of a candidate."""
        if self.path is None or findings.untuned is None:
            return
        self._readings[findings.key] = {
            "untuned": findings.untuned.to_json(),
            "tuned": None if findings.tuned is None else findings.tuned.to_json(),
            "failed": findings.failed,
        }
        make_folder(self.path.parent)
        write_json(self.path, {"conditions": self._conditions, "readings": self._readings})
