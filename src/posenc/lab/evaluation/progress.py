"""Progress of a study: callbacks, and a file that keeps measurements across interruptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from posenc.errors import CheckpointError, Interrupted
from posenc.lab.codec import from_plain, to_plain
from posenc.lab.evaluation.results import Findings, StudyReading
from posenc.lab.evaluation.suites.contexts import MeasuredContext
from posenc.lab.training.seeding import fingerprint
from posenc.storage import make_folder, read_json, write_json

Progress = Callable[[str, float, int], None]
"""Called with the current stage, how many models are done, and the number of all."""

PLANNED = "planned: "
"""Beginning of a stage that says what will be done; it stays to be read."""

REMEDY = "Delete it, and all is measured again."


def silent(stage: str, done: float, total: int) -> None:
    """Report nothing."""


@contextmanager
def kept(state: Path, command: str = "") -> Iterator[None]:
    """Add to an ``Interrupted`` where the work is kept and how to continue.

    After another error the file is removed, unless it is of an earlier run.
    """
    earlier = state.exists()
    try:
        yield
    except Interrupted as error:
        again = command or "call it again with the same arguments."
        error.remedy = f"What was done is kept in {state}. To go on: {again}"
        raise
    except Exception:
        if not earlier:
            state.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Measured:
    """The measured fields of ``Findings``."""

    untuned: StudyReading | None
    tuned: StudyReading | None
    failed: str


@dataclass(frozen=True)
class MeasuredState:
    """Contents of a ``MeasuredFile``: readings and contexts by candidate, and their conditions."""

    conditions: str
    readings: Mapping[str, Measured] = field(default_factory=dict)
    contexts: Mapping[str, tuple[MeasuredContext, ...]] = field(default_factory=dict)


class MeasuredFile:
    """The readings of a study's candidates, in a JSON file.

    Args:
        path: of the file; None keeps nothing.
        weights: of the model before it is extended.
        conditions: all else that readings depend on; readings under others are discarded.

    Raises:
        CheckpointError: if the file is damaged.
    """

    def __init__(self, path: Path | None, weights: Iterable[Tensor], *conditions: object) -> None:
        self.path, self._state = path, MeasuredState("")
        if path is None:
            return
        sums = [float(weight.detach().double().sum()) for weight in weights]
        self._state = MeasuredState(fingerprint(sums, *conditions))
        if not path.exists():
            return
        plain = read_json(path, remedy=REMEDY)
        if not isinstance(plain, dict) or plain.get("conditions") != self._state.conditions:
            return
        try:
            self._state = from_plain(MeasuredState, plain)
        except TypeError as error:
            raise CheckpointError(
                str(path), expected="the readings of a study", got=error, remedy=REMEDY
            ) from error

    def get(self, key: str) -> Measured | None:
        """The readings of a candidate; None if it has not been measured."""
        return self._state.readings.get(key)

    def untuned(self, key: str) -> StudyReading | None:
        """The reading of a candidate before fine-tuning."""
        recorded = self.get(key)
        return None if recorded is None else recorded.untuned

    def add(self, findings: Findings) -> None:
        """Keep the readings of a candidate."""
        if self.path is None or findings.untuned is None:
            return
        measured = Measured(findings.untuned, findings.tuned, findings.failed)
        readings = {**self._state.readings, findings.key: measured}
        self._write(replace(self._state, readings=readings))

    @property
    def contexts(self) -> Mapping[str, Sequence[MeasuredContext]]:
        """The contexts that candidates have read, by key."""
        return self._state.contexts

    def add_contexts(self, key: str, contexts: Sequence[MeasuredContext]) -> None:
        """Keep the contexts that a candidate has read."""
        if self.path is not None:
            kept = {**self._state.contexts, key: tuple(contexts)}
            self._write(replace(self._state, contexts=kept))

    def _write(self, state: MeasuredState) -> None:
        assert self.path is not None  # else nothing is kept
        self._state = state
        make_folder(self.path.parent)
        write_json(self.path, to_plain(state))
